"""Products of experts in MXFP4 (`model.mxfp4.PackedStack`) on Hopper: a persistent warp-specialized kernel.

    two producers, 1 warp     words of a block of the weight's rows, and DEPTH elements of the tile's rows of x, by the
                              copy engine, some stages ahead
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

from radixrt.worker.cuda import kernels, launching, packed_experts, routing
from radixrt.worker.cuda.hopper_experts import place
from radixrt.worker.cuda.hopper_int4 import SETTLE, SETTLED
from radixrt.worker.cuda.kernels import ACTIVATIONS, gated
from radixrt.worker.cuda.products import processors
from radixrt.worker.cuda.routing import TILE_FIELDS
from radixrt.worker.cuda.warpgroups import agrees, copy
from radixrt.worker.model.mxfp4 import WIDTH, WORDS, PackedStack

if TYPE_CHECKING:
    from radixrt.worker.cuda.routing import Order

DEPTH, GROUP = 64, 8
PARTS = WIDTH // DEPTH
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


HALVES: gl.constexpr = gl.constexpr(tuple(_expand(select).value for select in ("0x5410", "0x7632")))
REGISTERS: gl.constexpr = gl.constexpr(",".join(["=r"] * 4 + ["r"] * 6))


@gluon.jit
def _feed_words(
    w_there, tiles_ptr, w_smem, full, empty, tiles, across, columns, blocks, GATED: gl.constexpr,
    HALF_ROWS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, FIELDS: gl.constexpr,
):  # fmt: skip
    count = 0
    for index in range(gl.program_id(0), tiles * across, gl.num_programs(0)):
        tile, block = place(index, tiles, across, GROUP)
        at = tiles_ptr + tile * FIELDS
        if gl.load(at + 2) > 0:
            if GATED:
                height = 2 * columns
                apart = columns
                row = gl.load(at) * blocks * height + block * HALF_ROWS
            else:
                height = columns
                apart = HALF_ROWS
                row = gl.load(at) * blocks * height + block * 2 * HALF_ROWS
            for _ in range(blocks):
                stage = count % STAGES
                bar = full.index(stage)
                mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
                mbarrier.expect(bar, 2 * w_there.block_type.nbytes)
                copy(w_there, [row, 0], bar, w_smem.index(stage).slice(0, HALF_ROWS))
                copy(w_there, [row + apart, 0], bar, w_smem.index(stage).slice(HALF_ROWS, HALF_ROWS))
                row += height
                count += 1


@gluon.jit
def _feed_x(
    x_there, tiles_ptr, x_smem, full, empty, tiles, across, blocks, before, DEPTH: gl.constexpr, WIDTH: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, FIELDS: gl.constexpr,
):  # fmt: skip
    count = 0
    for index in range(gl.program_id(0), tiles * across, gl.num_programs(0)):
        tile, _ = place(index, tiles, across, GROUP)
        at = tiles_ptr + tile * FIELDS
        if gl.load(at + 2) > 0:
            row = gl.load(at + 1)
            for k in range(0, blocks * WIDTH, DEPTH):
                stage = count % STAGES
                bar = full.index(stage)
                mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
                mbarrier.expect(bar, x_there.block_type.nbytes)
                copy(x_there, [row, k - before], bar, x_smem.index(stage))
                count += 1


@gluon.jit
def _words(
    w_smem, full, empty, count, real, HALF: gl.constexpr, GATED: gl.constexpr, HALF_ROWS: gl.constexpr,
    STAGES: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """The words of a block, of the consumer's rows: int32[64, 16]; anything if it is not `real`."""
    stage = count % STAGES
    mbarrier.wait(full.index(stage), (count // STAGES) & 1, pred=real)
    if GATED:
        PIECE: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 8]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [32, 16]
        )
        gate = w_smem.index(stage).slice(HALF * 32, 32).load(PIECE)
        up = w_smem.index(stage).slice(HALF_ROWS + HALF * 32, 32).load(PIECE)
        both = gl.join(gate, up).reshape([4, 8, 16, 2]).permute((0, 3, 1, 2)).reshape([64, 16])
        w = gl.convert_layout(both, W, assert_trivial=True)
    else:
        w = w_smem.index(stage).slice(HALF * HALF_ROWS, HALF_ROWS).load(W)
    mbarrier.arrive(empty.index(stage), pred=real)
    return w


@gluon.jit
def _factor(scales, number: gl.constexpr):
    """2**126 times the scale of the columns 32 * number and following, bfloat16, twice in a word: int32[64, 1]."""
    bits = (((scales >> (8 * number)) & 255) + 126) << 7
    return gl.expand_dims(bits | (bits << 16), 1)


@gluon.jit
def _expanded(w, scales, part: gl.constexpr, W: gl.constexpr):
    """The weights of words w[64, 16] of the columns 64 * part and following: bfloat16[64, 64]."""
    values = [w, _factor(scales, 2 * part), _factor(scales, 2 * part + 1)]
    w0, w1, w2, w3 = gl.inline_asm_elementwise(
        HALVES[part], REGISTERS, values, dtype=(gl.bfloat16,) * 4, is_pure=False, pack=2
    )
    each = gl.join(gl.join(w0, w1), gl.join(w2, w3))  # [row, word, value % 2, value // 2]
    a = gl.convert_layout(each.permute((0, 3, 2, 1)).reshape([64, 64]), W, assert_trivial=True)
    return gl.inline_asm_elementwise(SETTLE, SETTLED, [a], dtype=a.dtype, is_pure=False, pack=32)


@gluon.jit
def _store(values, out_ptr, row, first, size, columns, COUNT: gl.constexpr, TOKENS: gl.constexpr):
    """Store a warpgroup's values [COUNT, TOKENS], transposed, from column `first` on, as far as the tile has rows
    (`size`): 16 bytes per thread."""
    if COUNT == 64:
        L: gl.constexpr = gl.DistributedLinearLayout(
            [[1, 0], [2, 0], [4, 0], [0, 16]] + [[0, 32], [0, 64], [0, 128]][: TOKENS // 64 - TOKENS // 256],
            [[8, 0], [16, 0], [32, 0], [0, 1], [0, 2]], [[0, 4], [0, 8]], [], [64, TOKENS],
        )  # fmt: skip
    else:
        L: gl.constexpr = gl.DistributedLinearLayout(
            [[1, 0], [2, 0], [4, 0]] + [[0, 32], [0, 64], [0, 128]][: TOKENS // 64 - TOKENS // 256],
            [[8, 0], [16, 0], [0, 1], [0, 2], [0, 4]], [[0, 8], [0, 16]], [], [32, TOKENS],
        )  # fmt: skip
    values = gl.convert_layout(values.to(out_ptr.dtype.element_ty), L)
    n = first + gl.arange(0, COUNT, layout=gl.SliceLayout(1, L))
    m = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, L))
    at = out_ptr + (row + m).to(gl.int64)[None, :] * columns + n[:, None]
    gl.store(at, values, mask=(m < size)[None, :] & (n < columns)[:, None])


@gluon.jit
def _multiply(
    tiles_ptr, scales_ptr, bias_ptr, out_ptr, x_smem, w_smem, x_full, x_empty, w_full, w_empty, tiles, across, columns,
    blocks, HALF: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
    TOKENS: gl.constexpr, PARTS: gl.constexpr, HALF_ROWS: gl.constexpr, X_STAGES: gl.constexpr,
    W_STAGES: gl.constexpr, GROUP: gl.constexpr, FIELDS: gl.constexpr,
):  # fmt: skip
    """The consumer of one half of the weight's rows of each tile of the program."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    W: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    TYPE: gl.constexpr = out_ptr.dtype.element_ty
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, W))
    x_count = 0
    w_count = 0
    for index in range(gl.program_id(0), tiles * across, gl.num_programs(0)):
        tile, block = place(index, tiles, across, GROUP)
        at = tiles_ptr + tile * FIELDS
        size = gl.load(at + 2)
        if size > 0:
            expert = gl.load(at).to(gl.int64)
            # Rows past the last one are computed with other scales, and not stored.
            if GATED:
                height = 2 * columns
                n = gl.minimum(block * HALF_ROWS + HALF * 32 + i // 16 * 8 + i % 8, columns - 1) + i // 8 % 2 * columns
            else:
                height = columns
                n = gl.minimum(block * 2 * HALF_ROWS + HALF * 64 + i, columns - 1)
            s_at = scales_ptr + expert * blocks * height + n
            scales = gl.load(s_at)
            w = _words(w_smem, w_full, w_empty, w_count, True, HALF, GATED, HALF_ROWS, W_STAGES, W)
            a = _expanded(w, scales, 0, W)
            acc = gl.zeros([64, TOKENS], gl.float32, layout=MMA)
            mbarrier.wait(x_full.index(x_count % X_STAGES), (x_count // X_STAGES) & 1)
            for k in range(blocks):
                more = k + 1 < blocks
                s_at += gl.where(more, height, 0)
                later = gl.load(s_at)
                w_count += 1
                for part in gl.static_range(PARTS):
                    stage = x_count % X_STAGES
                    acc = warpgroup_mma(a, x_smem.index(stage).permute((1, 0)), acc, is_async=True)
                    x_count += 1
                    if part + 1 < PARTS:
                        a = _expanded(w, scales, part + 1, W)
                    else:
                        w = _words(w_smem, w_full, w_empty, w_count, more, HALF, GATED, HALF_ROWS, W_STAGES, W)
                        a = _expanded(w, later, 0, W)
                    real = more | (part + 1 < PARTS)
                    mbarrier.wait(x_full.index(x_count % X_STAGES), (x_count // X_STAGES) & 1, pred=real)
                    acc = warpgroup_mma_wait(0, deps=[acc])
                    mbarrier.arrive(x_empty.index(stage))
                scales = later
            row = gl.load(at + 1)
            if GATED:  # rounded where the model rounds
                first = block * HALF_ROWS + HALF * 32
                gate, up = gl.split(acc.reshape([4, 2, 8, TOKENS]).permute((0, 2, 3, 1)))
                gate, up = gate.reshape([32, TOKENS]), up.reshape([32, TOKENS])
                if BIAS:
                    own = gl.minimum(first + gl.arange(0, 32, layout=gl.SliceLayout(1, gate.type.layout)), columns - 1)
                    of_gate = bias_ptr + expert * 2 * columns + own
                    gate += gl.load(of_gate).to(gl.float32)[:, None]
                    up += gl.load(of_gate + columns).to(gl.float32)[:, None]
                values = gated(gate.to(TYPE).to(gl.float32), up.to(TYPE).to(gl.float32), ACTIVATION)
                _store(values, out_ptr, row, first, size, columns, 32, TOKENS)
            else:
                _store(acc, out_ptr, row, block * 2 * HALF_ROWS + HALF * 64, size, columns, 64, TOKENS)


@gluon.jit(do_not_specialize=["tiles"])
def _product_specialised(
    x_there, w_there, tiles_ptr, scales_ptr, bias_ptr, out_ptr, tiles, across, columns, blocks, before,
    GATED: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr, TOKENS: gl.constexpr, DEPTH: gl.constexpr,
    WIDTH: gl.constexpr, HALF_ROWS: gl.constexpr, X_STAGES: gl.constexpr, W_STAGES: gl.constexpr, GROUP: gl.constexpr,
    FIELDS: gl.constexpr, MULTIPLY_REGISTERS: gl.constexpr, FEED_REGISTERS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    launching.wait(EARLY, NEXT=False)
    x_smem = gl.allocate_shared_memory(x_there.dtype, [X_STAGES, TOKENS, DEPTH], x_there.layout)
    w_smem = gl.allocate_shared_memory(w_there.dtype, [W_STAGES, 2 * HALF_ROWS, WIDTH // 8], w_there.layout)
    x_full = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    x_empty = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    w_full = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], mbarrier.MBarrierLayout())
    w_empty = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(X_STAGES):
        mbarrier.init(x_full.index(i), count=1)
        mbarrier.init(x_empty.index(i), count=2)
    for i in gl.static_range(W_STAGES):
        mbarrier.init(w_full.index(i), count=1)
        mbarrier.init(w_empty.index(i), count=2)
    fence_async_shared()
    PARTS: gl.constexpr = WIDTH // DEPTH
    gl.warp_specialize(
        [
            (_multiply, (
                tiles_ptr, scales_ptr, bias_ptr, out_ptr, x_smem, w_smem, x_full, x_empty, w_full, w_empty, tiles,
                across, columns, blocks, 0, GATED, BIAS, ACTIVATION, TOKENS, PARTS, HALF_ROWS, X_STAGES, W_STAGES,
                GROUP, FIELDS,
            )),
            (_multiply, (
                tiles_ptr, scales_ptr, bias_ptr, out_ptr, x_smem, w_smem, x_full, x_empty, w_full, w_empty, tiles,
                across, columns, blocks, 1, GATED, BIAS, ACTIVATION, TOKENS, PARTS, HALF_ROWS, X_STAGES, W_STAGES,
                GROUP, FIELDS,
            )),
            (_feed_x, (
                x_there, tiles_ptr, x_smem, x_full, x_empty, tiles, across, blocks, before, DEPTH, WIDTH, X_STAGES,
                GROUP, FIELDS,
            )),
            (_feed_words, (
                w_there, tiles_ptr, w_smem, w_full, w_empty, tiles, across, columns, blocks, GATED, HALF_ROWS,
                W_STAGES, GROUP, FIELDS,
            )),
        ],
        [4, 1, 1],
        [MULTIPLY_REGISTERS, FEED_REGISTERS, FEED_REGISTERS],
    )  # fmt: skip


# ---------------------------------------------------------------- launches


@dataclass(frozen=True, slots=True)
class Kind:
    """Of a tile: rows of x, and stages of x and of words, as many as the shared memory holds."""

    rows: int
    x_stages: int
    w_stages: int


KINDS = Kind(32, 8, 8), Kind(64, 8, 8), Kind(128, 5, 6), Kind(256, 4, 4)
FEWEST = 16
"""The fewest rows per expert, on average, for which this kernel is used (bench/packed_experts.py)."""


def kind_for(rows: float) -> Kind:
    """The tile for this number of rows per expert, on average."""
    return next((kind for kind in KINDS if rows <= kind.rows), KINDS[-1])


def fits(*widths: int) -> bool:
    """Whether rows of these numbers of elements begin at multiples of 16 bytes, as the copy engine requires."""
    return all(width % 8 == 0 for width in widths)


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
    whole = weight.values.view(-1, words)
    x_layout, w_layout = gl.NVMMASharedLayout(128, 16), gl.NVMMASharedLayout(4 * WORDS, 32)
    x_there = TensorDescriptor(x, [*x.shape], [*x.stride()], [kind.rows, DEPTH], x_layout)
    w_there = TensorDescriptor(whole, [*whole.shape], [*whole.stride()], [HALF_ROWS, words], w_layout)
    launching.launch(
        _product_specialised, (min(processors(x.device), tiles * across),), None,
        x_there, w_there, order.tiles, weight.scales, x if bias is None else bias, out, tiles, across, columns, blocks,
        weight.before, gate, bias is not None, ACTIVATIONS.get(activation or "", 0), kind.rows, DEPTH, WIDTH,
        HALF_ROWS, kind.x_stages, kind.w_stages, GROUP, TILE_FIELDS, MULTIPLY_REGISTERS, FEED_REGISTERS, num_warps=4,
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
    stack, chosen = packed_experts.drawn(generator, device)
    order = routing.sort(chosen, len(stack), kind.rows)
    counts = chosen.flatten().bincount(minlength=len(stack)).tolist()
    x = torch.randn((len(chosen), stack.columns), generator=generator, device=device).bfloat16()
    bias = torch.randn((len(stack), stack.values.shape[2]), generator=generator, device=device).bfloat16()
    each = [a.float() @ stack.dequantized(n, torch.float32).T for n, a in enumerate(x.split(counts))]
    with_bias = torch.cat([a + bias[n].float() for n, a in enumerate(each)]).bfloat16()
    exact = torch.cat(each).flatten(), kernels.gate(with_bias, "silu").float().flatten()
    found = product(x, order, stack, None, kind=kind), product(x, order, stack, "silu", bias, kind=kind)
    return max(float((a.float().flatten() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))
