"""Products of experts in MXFP4 (`layers.mxfp4.PackedStack`) on Hopper: a persistent warp-specialized kernel.

    producer, 1 warp          WIDTH elements of the tile's rows of x, and the words and scales of these columns of the
                              weight's rows, by the copy engine, STAGES ahead
                                                      |  full            ^  empty
    two consumer warpgroups   64 rows of the weight each: expand words in registers, for the left operand, while the
                              columns before are multiplied; times x, the right operand

It is `hopper_int4` for tiles of rows of one expert. With a gate, of every 16 rows that a warp multiplies 8 are of gate
and 8 of up, the same ones: then each thread has both values of its results, and applies the gate to them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from triton import cdiv
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from radixrt.worker.cuda.attention.warpgroups import agrees, copy
from radixrt.worker.cuda.elementwise import kernels, launching
from radixrt.worker.cuda.elementwise.kernels import ACTIVATIONS, gated
from radixrt.worker.cuda.elementwise.launching import num_sms
from radixrt.worker.cuda.linear.trials import draw_experts
from radixrt.worker.cuda.moe import routing
from radixrt.worker.cuda.moe.hopper_experts import place
from radixrt.worker.cuda.moe.routing import TILE_FIELDS
from radixrt.worker.model.layers.fp8 import plain
from radixrt.worker.model.layers.mxfp4 import WIDTH, WORDS, PackedStack

if TYPE_CHECKING:
    from radixrt.worker.cuda.moe.routing import Order

GROUP = 8
"""Tiles whose columns are computed by programs that run at once (see `hopper_experts.place`)."""
HALF_ROWS = 64
"""Rows of the weight that are copied at once: two such parts are a tile's, of gate and up, or neighbouring rows."""
MULTIPLY_REGISTERS, FEED_REGISTERS = 240, 24


def _expand(select: str) -> gl.constexpr:
    """PTX that expands the four values in a half of two words to pairs of bfloat16, times their scales: as `EXPAND` of
    `packed_experts`. Operands: the pairs, the words, and 2**126 times the scale of the first two values and of the last
    two, twice in a word, for each of the words."""
    lines = ["{", ".reg .b32 half, size, sign;", f"prmt.b32 half, $4, $5, {select};"]
    for n in range(4):
        left, sign = 6 - 4 * n, 12 - 4 * n
        lines.append(f"{'shl' if left > 0 else 'shr'}.b32 size, half, {abs(left)};")
        lines.append(f"shl.b32 sign, half, {sign};" if sign else "mov.b32 sign, half;")
        lines.append("and.b32 size, size, 0x01C001C0;")
        lines.append("lop3.b32 size, sign, 0x80008000, size, 0xEA;")
        lines.append(f"mul.rn.bf16x2 ${n}, size, ${6 if n < 2 else 8};")
    return gl.constexpr("\n".join([*lines, "}"]))


FACTORS: gl.constexpr = gl.constexpr(
    "{.reg .b32 x; add.u32 x, $4, 0x7E7E7E7E;"  # no byte overflows: see `mxfp4.LARGEST`
    + "".join(f"prmt.b32 ${n}, x, 0, 0x{n}4{n}4; shr.b32 ${n}, ${n}, 1;" for n in range(4))
    + "}"
)
"""PTX that makes pairs of bfloat16, 2**126 times a scale, of the four scales in a word."""
HALVES: gl.constexpr = gl.constexpr(tuple(_expand(select).value for select in ("0x5410", "0x7632")))
REGISTERS: gl.constexpr = gl.constexpr(",".join(["=r"] * 4 + ["r"] * 6))
USE: gl.constexpr = gl.constexpr(
    "{.reg .pred p; .reg .b32 x; mov.b32 x, $16;"
    + "".join(f"xor.b32 x, x, ${16 + i};" for i in range(1, 16))
    + "setp.eq.u32 p, x, 0x12345678; @p fence.acq_rel.cta;"
    + "".join(f"mov.b32 ${i}, 0;" for i in range(16))
    + "}"
)
"""PTX that uses 16 registers for a branch that is hardly ever taken, and does no harm; its results mean nothing. The
assembler would otherwise move the instructions that compute them behind the next wait for products. (As `hopper_int4`'s
SETTLE, without copies of the registers.)"""
USED: gl.constexpr = gl.constexpr(",".join(["=r"] * 16 + ["r"] * 16))


@gluon.jit
def _feed(
    x_there, w_there, s_there, tiles_ptr, x_smem, w_smem, s_smem, full, empty, tiles, across, columns, blocks, before,
    GATED: gl.constexpr, WIDTH: gl.constexpr, HALF_ROWS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    FIELDS: gl.constexpr,
):  # fmt: skip
    BYTES: gl.constexpr = 2 * (x_there.block_type.nbytes + w_there.block_type.nbytes + s_there.block_type.nbytes)
    count = 0
    for index in range(gl.program_id(0), tiles * across, gl.num_programs(0)):
        tile, block = place(index, tiles, across, GROUP)
        at = tiles_ptr + tile * FIELDS
        if gl.load(at + 2) > 0:
            if GATED:
                height = 2 * columns
                one = block * HALF_ROWS
                other = one + columns
            else:
                height = columns
                one = block * 2 * HALF_ROWS
                other = one + HALF_ROWS
            row = gl.load(at + 1)
            of_expert = gl.load(at) * blocks
            for k in range(blocks):
                stage = count % STAGES
                bar = full.index(stage)
                mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
                mbarrier.expect(bar, BYTES)
                copy(s_there, [of_expert + k, one], bar, s_smem.index(2 * stage))
                copy(s_there, [of_expert + k, other], bar, s_smem.index(2 * stage + 1))
                copy(w_there, [(of_expert + k) * height + one, 0], bar, w_smem.index(2 * stage))
                copy(w_there, [(of_expert + k) * height + other, 0], bar, w_smem.index(2 * stage + 1))
                copy(x_there, [row, k * WIDTH - before], bar, x_smem.index(2 * stage))
                copy(x_there, [row, k * WIDTH + WIDTH // 2 - before], bar, x_smem.index(2 * stage + 1))
                count += 1


@gluon.jit
def _words(w_smem, s_smem, stage, HALF: gl.constexpr, GATED: gl.constexpr, W: gl.constexpr):
    """The words int32[64, 16] and the scales int32[64] of a block, of the consumer's rows."""
    if GATED:
        WORDS: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 8]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [32, 16]
        )
        SCALES: gl.constexpr = gl.DistributedLinearLayout(
            [], [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]], [[0, 8], [0, 16]], [], [1, 32]
        )
        gate = w_smem.index(2 * stage).slice(HALF * 32, 32).load(WORDS)
        up = w_smem.index(2 * stage + 1).slice(HALF * 32, 32).load(WORDS)
        of_gate = s_smem.index(2 * stage).slice(HALF * 32, 32, 1).load(SCALES).reshape([32])
        of_up = s_smem.index(2 * stage + 1).slice(HALF * 32, 32, 1).load(SCALES).reshape([32])
        w = gl.join(gate, up).reshape([4, 8, 16, 2]).permute((0, 3, 1, 2)).reshape([64, 16])
        scales = gl.join(of_gate, of_up).reshape([4, 8, 2]).permute((0, 2, 1)).reshape([64])
    else:
        ALL_SCALES: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 8]], [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]], [[0, 16], [0, 32]], [], [1, 64]
        )
        w = w_smem.index(2 * stage + HALF).load(W)
        scales = s_smem.index(2 * stage + HALF).load(ALL_SCALES).reshape([64])
    w = gl.convert_layout(w, W, assert_trivial=True)
    return w, gl.convert_layout(scales, gl.SliceLayout(1, W), assert_trivial=True)


@gluon.jit
def _factors(scales):
    """2**126 times the four scales of each row, each as two bfloat16 in a word: int32[64, 1]."""
    f0, f1, f2, f3 = gl.inline_asm_elementwise(
        FACTORS, "=r,=r,=r,=r,r", [scales], dtype=(gl.int32,) * 4, is_pure=True, pack=1
    )
    return gl.expand_dims(f0, 1), gl.expand_dims(f1, 1), gl.expand_dims(f2, 1), gl.expand_dims(f3, 1)


@gluon.jit
def _expanded(w, one, other, part: gl.constexpr, W: gl.constexpr):
    """The weights of words w[64, 16] of the columns 64 * part and following, with two of `_factors`: bfloat16[64,
    64]."""
    w0, w1, w2, w3 = gl.inline_asm_elementwise(
        HALVES[part], REGISTERS, [w, one, other], dtype=(gl.bfloat16,) * 4, is_pure=False, pack=2
    )
    each = gl.join(gl.join(w0, w1), gl.join(w2, w3))  # [row, word, value % 2, value // 2]
    a = gl.convert_layout(each.permute((0, 3, 2, 1)).reshape([64, 64]), W, assert_trivial=True)
    gl.inline_asm_elementwise(USE, USED, [a], dtype=a.dtype, is_pure=False, pack=32)
    return a


@gluon.jit
def _weights(w_smem, s_smem, stage, HALF: gl.constexpr, GATED: gl.constexpr, W: gl.constexpr):
    """The weights of a block, of the consumer's rows: twice bfloat16[64, 64]."""
    w, scales = _words(w_smem, s_smem, stage, HALF, GATED, W)
    f0, f1, f2, f3 = _factors(scales)
    return _expanded(w, f0, f1, 0, W), _expanded(w, f2, f3, 1, W)


@gluon.jit
def _store(values, out_ptr, row, first, size, columns, COUNT: gl.constexpr, TOKENS: gl.constexpr, L: gl.constexpr):
    """Store a warpgroup's values [COUNT, TOKENS], transposed, from column `first` on, as far as the tile has rows
    (`size`)."""
    values = gl.convert_layout(values.to(out_ptr.dtype.element_ty), L)
    n = first + gl.arange(0, COUNT, layout=gl.SliceLayout(1, L))
    m = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, L))
    at = out_ptr + (row + m).to(gl.int64)[None, :] * columns + n[:, None]
    gl.store(at, values, mask=(m < size)[None, :] & (n < columns)[:, None])


@gluon.jit
def _gated(
    acc, bias_at, first, columns, BIAS: gl.constexpr, ACTIVATION: gl.constexpr, TOKENS: gl.constexpr, TYPE: gl.constexpr
):  # fmt: skip
    """The results [32, TOKENS] of sums of gate and up [64, TOKENS]; `bias_at`: the biases of the expert."""
    gate, up = gl.split(acc.reshape([4, 2, 8, TOKENS]).permute((0, 2, 3, 1)))
    gate, up = gate.reshape([32, TOKENS]), up.reshape([32, TOKENS])
    if BIAS:
        n = gl.minimum(first + gl.arange(0, 32, layout=gl.SliceLayout(1, gate.type.layout)), columns - 1)
        gate += gl.load(bias_at + n).to(gl.float32)[:, None]
        up += gl.load(bias_at + columns + n).to(gl.float32)[:, None]
    # Rounded where the model rounds.
    return gated(gate.to(TYPE).to(gl.float32), up.to(TYPE).to(gl.float32), ACTIVATION)


@gluon.jit
def _multiply(
    tiles_ptr, bias_ptr, out_ptr, x_smem, w_smem, s_smem, full, empty, tiles, across, columns, blocks,
    HALF: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr, STORED: gl.constexpr, TOKENS: gl.constexpr, HALF_ROWS: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, FIELDS: gl.constexpr,
):  # fmt: skip
    """The consumer of one half of the weight's rows of each tile of the program."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    W: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    TYPE: gl.constexpr = out_ptr.dtype.element_ty
    count = 0
    for index in range(gl.program_id(0), tiles * across, gl.num_programs(0)):
        tile, block = place(index, tiles, across, GROUP)
        at = tiles_ptr + tile * FIELDS
        size = gl.load(at + 2)
        if size > 0:
            mbarrier.wait(full.index(count % STAGES), (count // STAGES) & 1)
            a, b = _weights(w_smem, s_smem, count % STAGES, HALF, GATED, W)
            acc = gl.zeros([64, TOKENS], gl.float32, layout=MMA)
            for k in range(blocks):
                stage = count % STAGES
                acc = warpgroup_mma(a, x_smem.index(2 * stage).permute((1, 0)), acc, is_async=True)
                acc = warpgroup_mma(b, x_smem.index(2 * stage + 1).permute((1, 0)), acc, is_async=True)
                count += 1
                # After the last block, what is read here is not used.
                mbarrier.wait(full.index(count % STAGES), (count // STAGES) & 1, pred=k + 1 < blocks)
                a, b = _weights(w_smem, s_smem, count % STAGES, HALF, GATED, W)
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(empty.index(stage))
            row = gl.load(at + 1)
            if GATED:
                first = block * HALF_ROWS + HALF * 32
                bias_at = bias_ptr + gl.load(at).to(gl.int64) * 2 * columns
                values = _gated(acc, bias_at, first, columns, BIAS, ACTIVATION, TOKENS, TYPE)
                _store(values, out_ptr, row, first, size, columns, 32, TOKENS, STORED)
            else:
                first = block * 2 * HALF_ROWS + HALF * 64
                _store(acc, out_ptr, row, first, size, columns, 64, TOKENS, STORED)


@gluon.jit(do_not_specialize=["tiles"])
def _product_specialised(
    x_there, w_there, s_there, tiles_ptr, bias_ptr, out_ptr, tiles, across, columns, blocks,
    before, GATED: gl.constexpr, BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr, STORED: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, WIDTH: gl.constexpr,
    HALF_ROWS: gl.constexpr, GROUP: gl.constexpr, FIELDS: gl.constexpr, MULTIPLY_REGISTERS: gl.constexpr,
    FEED_REGISTERS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    x_smem = gl.allocate_shared_memory(x_there.dtype, [2 * STAGES, TOKENS, WIDTH // 2], x_there.layout)
    w_smem = gl.allocate_shared_memory(w_there.dtype, [2 * STAGES, HALF_ROWS, WIDTH // 8], w_there.layout)
    s_smem = gl.allocate_shared_memory(s_there.dtype, [2 * STAGES, 1, HALF_ROWS], s_there.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    launching.wait(EARLY, NEXT=False)
    gl.warp_specialize(
        [
            (_multiply, (
                tiles_ptr, bias_ptr, out_ptr, x_smem, w_smem, s_smem, full, empty, tiles, across, columns,
                blocks, 0, GATED, BIAS, ACTIVATION, STORED, TOKENS, HALF_ROWS, STAGES, GROUP, FIELDS,
            )),
            (_multiply, (
                tiles_ptr, bias_ptr, out_ptr, x_smem, w_smem, s_smem, full, empty, tiles, across, columns,
                blocks, 1, GATED, BIAS, ACTIVATION, STORED, TOKENS, HALF_ROWS, STAGES, GROUP, FIELDS,
            )),
            (_feed, (
                x_there, w_there, s_there, tiles_ptr, x_smem, w_smem, s_smem, full, empty, tiles, across, columns,
                blocks, before, GATED, WIDTH, HALF_ROWS, STAGES, GROUP, FIELDS,
            )),
        ],
        [4, 1],
        [MULTIPLY_REGISTERS, FEED_REGISTERS],
    )  # fmt: skip


# ---------------------------------------------------------------- launches


@dataclass(frozen=True, slots=True)
class Kind:
    """Of a tile: rows of x, and stages, as many as the shared memory holds."""

    rows: int
    stages: int


TILE_128, TILE_256 = KINDS = Kind(128, 5), Kind(256, 3)
MIN_ROWS = 64
"""The fewest rows per expert, on average, for which this kernel is used (bench/packed_experts.py)."""


def kind_for(rows: float) -> Kind:
    """The tile for this number of rows per expert, on average."""
    return TILE_128 if rows <= TILE_128.rows else TILE_256


def fits(*widths: int) -> bool:
    """Whether rows of these numbers of elements, of 2 or 4 bytes, begin at multiples of 16 bytes, as the copy engine
    requires."""
    return all(width % 8 == 0 for width in widths)


@functools.cache
def _stored(count: int, tokens: int) -> gl.DistributedLinearLayout:
    """The layout [count, tokens] in which a warpgroup stores: 8 neighbouring columns per thread, 16 bytes, then the
    other columns, then rows of the result."""
    bits = [[1 << i, 0] for i in range(count.bit_length() - 1)] + [[0, 1 << i] for i in range(tokens.bit_length() - 1)]
    return gl.DistributedLinearLayout(bits[:3] + bits[10:], bits[3:8], bits[8:10], [], [count, tokens])


def product(
    x: torch.Tensor, order: Order, weight: PackedStack, activation: str | None, bias: torch.Tensor | None = None,
    *, kind: Kind,
) -> torch.Tensor:  # fmt: skip
    """Multiply x[R, K], sorted by expert as `order` says, by each expert's weight[E, N, K] transposed: [R, N]. With an
    activation, bias[E, N] is added if given, and the result [R, N / 2] is `kernels.gated` of both halves. `order` must
    have tiles of `kind.rows`. x and results are bfloat16, with rows of a multiple of 16 bytes."""
    gate = activation is not None
    _, blocks, height, words = weight.values.shape
    columns = height // 2 if gate else height
    across, tiles = cdiv(columns, HALF_ROWS if gate else 2 * HALF_ROWS), len(order.tiles)
    out = torch.empty((len(x), columns), dtype=x.dtype, device=x.device)
    boxes = (
        (x, [kind.rows, WIDTH // 2], gl.NVMMASharedLayout(128, 16)),
        (weight.values.view(-1, words), [HALF_ROWS, words], gl.NVMMASharedLayout(4 * WORDS, 32)),
        (weight.scales.view(-1, height), [1, HALF_ROWS], gl.NVMMASharedLayout(0, 32)),
    )
    there = (TensorDescriptor(t, [*t.shape], [*t.stride()], box, layout) for t, box, layout in boxes)
    act = ACTIVATIONS.get(activation or "", 0)
    launching.launch(
        _product_specialised, (min(num_sms(x.device), tiles * across),), None,
        *there, order.tiles, x if bias is None else bias, out, tiles, across, columns, blocks,
        weight.before, gate, bias is not None, act, _stored(32 if gate else 64, kind.rows),
        kind.rows, kind.stages, WIDTH, HALF_ROWS, GROUP, TILE_FIELDS, MULTIPLY_REGISTERS, FEED_REGISTERS, num_warps=4,
    )  # fmt: skip
    return out


# ---------------------------------------------------------------- where it is used


@functools.cache
def there(device: torch.device) -> bool:
    """Whether the kernel works on this device."""
    return agrees(lambda: max(_apart(device, kind) for kind in KINDS), device)


def _apart(device: torch.device, kind: Kind) -> float:
    """The relative error to float32, for a few experts whose rows fill tiles, or do not: of a product with a gate and a
    bias, and of one without, of columns that begin within a group that shares a scale."""
    generator = torch.Generator(device).manual_seed(0)
    stack, chosen = draw_experts(generator, device)
    assert isinstance(stack, PackedStack)
    order = routing.sort(chosen, len(stack), kind.rows)
    counts = chosen.flatten().bincount(minlength=len(stack)).tolist()
    x = torch.randn((len(chosen), stack.columns), generator=generator, device=device).bfloat16()
    bias = torch.randn((len(stack), stack.values.shape[2]), generator=generator, device=device).bfloat16()
    each = [a.float() @ stack.dequantized(n, torch.float32).T for n, a in enumerate(x.split(counts))]
    with_bias = torch.cat([a + bias[n].float() for n, a in enumerate(each)]).bfloat16()
    exact = torch.cat(each).flatten(), plain(kernels.gate(with_bias, "silu")).float().flatten()
    results = product(x, order, stack, None, kind=kind), product(x, order, stack, "silu", bias, kind=kind)
    return max(float((a.float().flatten() - b).norm() / b.norm()) for a, b in zip(results, exact, strict=True))
