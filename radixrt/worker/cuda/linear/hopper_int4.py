"""Products with a weight in INT4 on Hopper: a persistent warp-specialized kernel.

    two producers, 1 warp     words of a block of the weight's rows, and DEPTH elements of the rows of x, by the copy
                              engine, some stages ahead
                                                      |  full            ^  empty
    two consumer warpgroups   64 rows of the weight each: expand words in registers, for the left operand, while the
                              columns before are multiplied; times x, the right operand
                                                      |
    copy engine (TMA)         result -> memory, while the next tile is multiplied

As in `int4`, few programs divide K, and the last of them to end adds their sums.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from triton import cdiv
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from radixrt.worker.cuda.attention.warpgroups import agrees, copy, copy_back
from radixrt.worker.cuda.elementwise import launching
from radixrt.worker.cuda.elementwise.launching import KernelCache, num_sms
from radixrt.worker.cuda.linear.trials import draw_int4
from radixrt.worker.cuda.linear.unpack_int4 import LESS, LESS16, expansion, load_facts, operands
from radixrt.worker.cuda.moe.hopper_experts import place
from radixrt.worker.model.layers.int4 import MIDDLE, WIDTH, WORDS, Int4

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""By the names that Triton 3.9 and newer or older versions have for it."""
ROWS = 128
"""Rows of the weight of a tile: two warpgroups of 64."""
DEPTH, GROUP = 64, 16
MULTIPLY_REGISTERS, FEED_REGISTERS = 240, 24

PAIRS16: gl.constexpr = gl.constexpr(
    tuple(expansion(0x3C00, 0x6400, "f16x2", s, n).value for s in ("0x5410", "0x7632") for n in ((0, 1), (2, 3)))
)
PAIRS: gl.constexpr = gl.constexpr(
    tuple(expansion(0x3F80, 0x4300, "bf16x2", s, n).value for s in ("0x5410", "0x7632") for n in ((0, 1), (2, 3)))
)
SETTLE: gl.constexpr = gl.constexpr(
    "{.reg .pred p; .reg .b32 x; mov.b32 x, $0;"
    + "".join(f"xor.b32 x, x, ${i};" for i in range(1, 16))
    + "setp.eq.u32 p, x, 0x12345678; @p fence.acq_rel.cta;}"
)
SETTLED: gl.constexpr = gl.constexpr(",".join(["=r"] * 16 + [str(i) for i in range(16)]))
"""PTX that leaves 16 registers as they are, and uses them for a branch that is hardly ever taken, and does no harm. The
assembler would otherwise move the instructions that compute them behind the next wait for products."""
REGISTERS: gl.constexpr = gl.constexpr(",".join(["=r"] * 2 + ["r"] * 10))


@gluon.jit
def _span(index, tiles, across, blocks, splits, GROUP: gl.constexpr):
    """Of a part of a tile: the tile's number of rows of x, that of rows of the weight, its blocks of K, from and to."""
    tile, block = place(index // splits, tiles, across, GROUP)
    each = (blocks + splits - 1) // splits
    begin = index % splits * each
    return tile, block, begin, gl.minimum(begin + each, blocks)


@gluon.jit
def _feed_words(
    w_there, w_smem, full, empty, tiles, across, columns, blocks, splits, ROWS: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    count = 0
    for index in range(gl.program_id(0), tiles * across * splits, gl.num_programs(0)):
        _, block, begin, end = _span(index, tiles, across, blocks, splits, GROUP)
        for k in range(begin, end):
            stage = count % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, w_there.block_type.nbytes)
            copy(w_there, [k * columns + block * ROWS, 0], bar, w_smem.index(stage))
            count += 1


@gluon.jit
def _feed_x(
    x_there, x_smem, full, empty, tiles, across, blocks, splits, TOKENS: gl.constexpr,
    DEPTH: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    count = 0
    for index in range(gl.program_id(0), tiles * across * splits, gl.num_programs(0)):
        tile, _, begin, end = _span(index, tiles, across, blocks, splits, GROUP)
        for k in range(begin * WIDTH, end * WIDTH, DEPTH):
            stage = count % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, x_there.block_type.nbytes)
            copy(x_there, [tile * TOKENS, k], bar, x_smem.index(stage))
            count += 1


@gluon.jit
def _words(w_smem, full, empty, count, real, HALF: gl.constexpr, STAGES: gl.constexpr, W: gl.constexpr):
    """The words of a block, of the consumer's rows: int32[64, 32]; anything if it is not `real`."""
    stage = count % STAGES
    mbarrier.wait(full.index(stage), (count // STAGES) & 1, pred=real)
    w = w_smem.index(stage).slice(HALF * 64, 64).load(W)
    mbarrier.arrive(empty.index(stage), pred=real)
    return w


@gluon.jit
def _expanded(
    w, facts, part: gl.constexpr, dtype: gl.constexpr, GROUPS: gl.constexpr, ZEROS: gl.constexpr,
    MIDDLE: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """The weights of words w[64, 32] of the columns 64 * part and following: [64, 64]."""
    less: gl.constexpr = LESS16 if dtype == gl.float16 else LESS
    s0, z0 = operands(facts, 2 * part, GROUPS, ZEROS, MIDDLE, less)
    s1, z1 = operands(facts, 2 * part + 1, GROUPS, ZEROS, MIDDLE, less)
    values = [w, s0, z0, s1, z1]
    if dtype == gl.float16:
        one, other = gl.inline_asm_elementwise(
            PAIRS16[part], REGISTERS, values, dtype=(gl.float16,) * 2, is_pure=False, pack=2
        )
    else:
        one, other = gl.inline_asm_elementwise(
            PAIRS[part], REGISTERS, values, dtype=(gl.bfloat16,) * 2, is_pure=False, pack=2
        )
    a = gl.convert_layout(gl.join(one, other).permute((0, 2, 1)).reshape([64, 64]), W, assert_trivial=True)
    return gl.inline_asm_elementwise(SETTLE, SETTLED, [a], dtype=a.dtype, is_pure=False, pack=32)


@gluon.jit
def _multiply(
    out_there, facts_ptr, bias_ptr, sums_ptr, counts_ptr, x_smem, w_smem, out_smem, x_full, x_empty, w_full, w_empty,
    loaded, tiles, across, columns, blocks, splits, HALF: gl.constexpr, GROUPS: gl.constexpr, ZEROS: gl.constexpr,
    FACTS: gl.constexpr, MIDDLE: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, X_STAGES: gl.constexpr, W_STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """The consumer of rows 64 * HALF to 64 * HALF + 63 of each tile of the program."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    W: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    TYPE: gl.constexpr = out_there.dtype
    x_count = 0
    w_count = 0
    turn = 0
    for index in range(gl.program_id(0), tiles * across * splits, gl.num_programs(0)):
        tile, block, begin, end = _span(index, tiles, across, blocks, splits, GROUP)
        to = [tile * TOKENS, block * ROWS + HALF * 64]
        tma.store_wait(0)  # the tile before has been read from there
        if ADD:
            mbarrier.expect(loaded, out_there.block_type.nbytes)
            copy(out_there, to, loaded, out_smem)
        n = block * ROWS + HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, W))
        # Rows past the last one are computed with other facts, and not stored.
        f_at = facts_ptr + begin.to(gl.int64) * columns * FACTS + gl.minimum(n, columns - 1)
        facts = load_facts(f_at, columns, GROUPS, ZEROS)
        w = _words(w_smem, w_full, w_empty, w_count, True, HALF, W_STAGES, W)
        a = _expanded(w, facts, 0, TYPE, GROUPS, ZEROS, MIDDLE, W)
        acc = gl.zeros([64, TOKENS], gl.float32, layout=MMA)
        mbarrier.wait(x_full.index(x_count % X_STAGES), (x_count // X_STAGES) & 1)
        for k in range(begin, end):
            more = k + 1 < end
            f_at += gl.where(more, columns * FACTS, 0)
            later = load_facts(f_at, columns, GROUPS, ZEROS)
            w_count += 1
            for part in gl.static_range(PARTS):
                stage = x_count % X_STAGES
                acc = warpgroup_mma(a, x_smem.index(stage).permute((1, 0)), acc, is_async=True)
                x_count += 1
                if part + 1 < PARTS:
                    a = _expanded(w, facts, part + 1, TYPE, GROUPS, ZEROS, MIDDLE, W)
                else:
                    w = _words(w_smem, w_full, w_empty, w_count, more, HALF, W_STAGES, W)
                    a = _expanded(w, later, 0, TYPE, GROUPS, ZEROS, MIDDLE, W)
                real = more | (part + 1 < PARTS)
                mbarrier.wait(x_full.index(x_count % X_STAGES), (x_count // X_STAGES) & 1, pred=real)
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(x_empty.index(stage))
            facts = later
        if ADD:
            mbarrier.wait(loaded, turn & 1)
            turn += 1
        last = True
        if splits > 1:
            i = gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))[:, None] * TOKENS
            i += gl.arange(0, TOKENS, layout=gl.SliceLayout(0, MMA))[None, :]
            number = index // splits * 2 + HALF
            kept = sums_ptr + number.to(gl.int64) * splits * (64 * TOKENS) + i
            gl.store(kept + index % splits * (64 * TOKENS), acc)
            barrier()  # the sums of all threads are there before they are counted
            last = gl.atomic_add(counts_ptr + number, 1, sem="acq_rel", scope="gpu") == splits - 1
            if last:
                acc = gl.load(kept, cache_modifier=".cg")
                for one in range(1, splits):
                    acc += gl.load(kept + one * (64 * TOKENS), cache_modifier=".cg")
                gl.store(counts_ptr + number, 0)  # for the next product
        if last:
            view = out_smem.permute((1, 0))
            if BIAS:
                at = block * ROWS + HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
                acc += gl.load(bias_ptr + gl.minimum(at, columns - 1)).to(gl.float32)[:, None]
            if ADD:
                acc += view.load(MMA).to(gl.float32)
            view.store(acc.to(TYPE))
            fence_async_shared()
            copy_back(out_there, to, out_smem)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "splits", "across", "columns", "blocks"])
def _product_specialised(
    x_there, w_there, out_there, facts_ptr, bias_ptr, sums_ptr, counts_ptr, tiles, splits, across, columns, blocks,
    GROUPS: gl.constexpr, ZEROS: gl.constexpr, FACTS: gl.constexpr, MIDDLE: gl.constexpr, BIAS: gl.constexpr,
    ADD: gl.constexpr, TOKENS: gl.constexpr, ROWS: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr,
    X_STAGES: gl.constexpr, W_STAGES: gl.constexpr, GROUP: gl.constexpr, MULTIPLY_REGISTERS: gl.constexpr,
    FEED_REGISTERS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    launching.wait(EARLY, NEXT=False)
    x_smem = gl.allocate_shared_memory(x_there.dtype, [X_STAGES, TOKENS, DEPTH], x_there.layout)
    w_smem = gl.allocate_shared_memory(w_there.dtype, [W_STAGES, ROWS, WIDTH // 8], w_there.layout)
    out_smem = gl.allocate_shared_memory(out_there.dtype, [2, TOKENS, 64], out_there.layout)
    x_full = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    x_empty = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    w_full = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], mbarrier.MBarrierLayout())
    w_empty = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], mbarrier.MBarrierLayout())
    loaded = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(X_STAGES):
        mbarrier.init(x_full.index(i), count=1)
        mbarrier.init(x_empty.index(i), count=2)
    for i in gl.static_range(W_STAGES):
        mbarrier.init(w_full.index(i), count=1)
        mbarrier.init(w_empty.index(i), count=2)
    mbarrier.init(loaded.index(0), count=1)
    mbarrier.init(loaded.index(1), count=1)
    fence_async_shared()
    PARTS: gl.constexpr = WIDTH // DEPTH
    gl.warp_specialize(
        [
            (_multiply, (
                out_there, facts_ptr, bias_ptr, sums_ptr, counts_ptr, x_smem, w_smem, out_smem.index(0), x_full,
                x_empty, w_full, w_empty, loaded.index(0), tiles, across, columns, blocks, splits, 0, GROUPS, ZEROS,
                FACTS, MIDDLE, BIAS, ADD, TOKENS, ROWS, PARTS, X_STAGES, W_STAGES, GROUP,
            )),
            (_multiply, (
                out_there, facts_ptr, bias_ptr, sums_ptr, counts_ptr, x_smem, w_smem, out_smem.index(1), x_full,
                x_empty, w_full, w_empty, loaded.index(1), tiles, across, columns, blocks, splits, 1, GROUPS, ZEROS,
                FACTS, MIDDLE, BIAS, ADD, TOKENS, ROWS, PARTS, X_STAGES, W_STAGES, GROUP,
            )),
            (_feed_x, (
                x_there, x_smem, x_full, x_empty, tiles, across, blocks, splits, TOKENS, DEPTH, WIDTH, X_STAGES, GROUP,
            )),
            (_feed_words, (
                w_there, w_smem, w_full, w_empty, tiles, across, columns, blocks, splits, ROWS, W_STAGES, GROUP,
            )),
        ],
        [4, 1, 1],
        [MULTIPLY_REGISTERS, FEED_REGISTERS, FEED_REGISTERS],
    )  # fmt: skip


# ---------------------------------------------------------------- launches


@dataclass(frozen=True, slots=True)
class Kind:
    """Of a tile: rows of x, and stages of x and of words, as many as the shared memory holds."""

    tokens: int
    x_stages: int
    w_stages: int


KINDS = Kind(32, 8, 8), Kind(64, 8, 6), Kind(128, 5, 4), Kind(256, 4, 2)
MAX_SPLITS = 4
"""The most programs that K is divided among."""
MAX_PARTS = 512
"""The most parts of tiles, of a product whose K is divided: their sums take up to 67 MB."""
MIN_BLOCK_ROWS, EXPAND = 80, 24
"""A block costs as much as its product with this many rows of x, at least; and as one with this many rows more."""
BEGIN, SUMS = 300, 0.4
"""Costs of a tile beside its blocks, and of sums that are written or read, per row of x: in rows of x that are
multiplied with a block. (bench/packed_linear.py --tiles)"""

_kernel_caches: dict[tuple[Any, ...], KernelCache] = {}
"""As that of `gemm`."""


@functools.cache
def _counts(device: torch.device) -> torch.Tensor:
    """Programs of each half of a tile that have ended: all 0 before and after a product."""
    return torch.zeros(2 * MAX_PARTS, dtype=torch.int32, device=device)


@functools.cache
def plan(rows: int, columns: int, depth: int, programs: int) -> tuple[Kind, int]:
    """The tile and the number of programs that K is divided among (`splits`) for which

        ceil(tiles * splits / programs) * (ceil(blocks / splits) * max(tokens + EXPAND, MIN_BLOCK_ROWS) + BEGIN + sums)

    is least, where sums is SUMS * tokens * (splits + 1) if K is divided.
    """
    blocks = cdiv(depth, WIDTH)

    def cost(found: tuple[Kind, int]) -> float:
        kind, splits = found
        tiles = cdiv(rows, kind.tokens) * cdiv(columns, ROWS)
        if splits > 1 and tiles * splits > MAX_PARTS:
            return math.inf
        sums = SUMS * kind.tokens * (splits + 1) if splits > 1 else 0
        each = cdiv(blocks, splits) * max(kind.tokens + EXPAND, MIN_BLOCK_ROWS) + BEGIN + sums
        return cdiv(tiles * splits, programs) * each

    splits = {cdiv(blocks, cdiv(blocks, splits)) for splits in range(1, MAX_SPLITS + 1)}
    return min(itertools.product(KINDS, sorted(splits)), key=cost)


def fits(x: torch.Tensor, weight: Int4, out: torch.Tensor) -> bool:
    """Whether the copy engine can copy the rows: they begin at multiples of 16 bytes."""
    whole = x.shape[1] % 8 == 0 and weight.rows % 8 == 0
    return whole and x.data_ptr() % 16 == 0 and out.data_ptr() % 16 == 0


def multiply(
    x: torch.Tensor, weight: Int4, out: torch.Tensor, kind: Kind, splits: int, *, bias: torch.Tensor | None = None,
    add: bool = False, programs: int | None = None,
) -> None:  # fmt: skip
    """As `int4.multiply`, by as many programs, or one on each multiprocessor. No part of K may be empty."""
    columns, blocks = weight.rows, len(weight.values)
    tiles, across = cdiv(len(x), kind.tokens), cdiv(columns, ROWS)
    words = weight.values.view(-1, WORDS)
    counts = _counts(x.device)
    size = splits * tiles * across * ROWS * kind.tokens if splits > 1 else 0
    sums = torch.empty(size, dtype=torch.float32, device=x.device) if size else counts.view(torch.float32)
    more = out if bias is None else bias
    boxes = (x, [kind.tokens, DEPTH]), (words, [ROWS, WORDS]), (out, [kind.tokens, 64])
    described = (
        TensorDescriptor(part, [*part.shape], [*part.stride()], box, gl.NVMMASharedLayout(128, 8 * part.itemsize))
        for part, box in boxes
    )
    kinds = (
        weight.groups, weight.has_zeros, weight.facts.shape[-2], MIDDLE, bias is not None, add, kind.tokens, ROWS,
        DEPTH, WIDTH, kind.x_stages, kind.w_stages, GROUP, MULTIPLY_REGISTERS, FEED_REGISTERS,
    )  # fmt: skip
    cache = None
    if all(pointer.data_ptr() % 16 == 0 for pointer in (weight.facts, more, sums, counts)):
        given = x.device, x.dtype, more.dtype, columns, blocks
        cache = _kernel_caches.setdefault((*given, *kinds), {})
    launching.launch(
        _product_specialised, (min(programs or num_sms(x.device), tiles * across * splits), 1, 1), cache,
        *described, weight.facts, more, sums, counts, tiles, splits, across, columns, blocks, *kinds, num_warps=4,
    )  # fmt: skip


# ---------------------------------------------------------------- where it is used


@functools.cache
def there(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel works on this device."""
    return agrees(lambda: max(_apart(device, dtype, *case) for case in ((32, 3, 128), (256, 1, 128))), device)


def _apart(device: torch.device, dtype: torch.dtype, tokens: int, splits: int, size: int) -> float:
    """The relative error of a product, added to a residual, with a random weight whose groups have `size` columns."""
    weight, x = draw_int4(device, dtype, 200, 1152, size, True, 300)
    out = torch.ones((300, 200), dtype=dtype, device=device)
    exact = x.float() @ weight.dequantized().float().t() + 1
    kind = next(kind for kind in KINDS if kind.tokens == tokens)
    multiply(x, weight, out, kind, splits, add=True)
    return float((out.float() - exact).norm() / exact.norm())
