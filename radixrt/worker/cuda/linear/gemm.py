"""Matrix products of few rows, out[T, N] = x[T, K] weight[N, K]', whose time is that of reading the weight.

Hopper's tensor cores take a multiple of 64 rows of the left operand, and a multiple of 8 of the right one, directly
from shared memory. With few tokens the weight is the left operand: then no padding is multiplied, and FP8 need not be
converted, for which there would be no time.

    fewer than 64 tokens per tile     out[T, n]' = weight[n, K] x[T, K]'
    64 and more                       out[T, n] = x[T, K] weight[n, K]'

The beginning of a weight is prefetched while the kernel before still runs: no kernel writes weights. Where there
are too few columns for all multiprocessors, several programs have a part of K each, and the last to end adds
their sums:

    split 0   w[n, 0:k] x[T, 0:k]'  --> sums 0 --+
    split 1   w[n, k:K] x[T, k:K]'  --> sums 1 --+--> out[T, n]

The last section decides which products of many rows are computed together with their gate (`hopper_gated`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.attention.variants import room
from radixrt.worker.cuda.elementwise.kernels import GATED_TILE
from radixrt.worker.cuda.elementwise.launching import KernelCache, launch, num_sms, wait
from radixrt.worker.model.layers.fp8 import BLOCK, Fp8Scaling


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program computes, rows x columns of the result in steps of `depth` along K, and its launch parameters."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


SCALES = {None: 0, Fp8Scaling.ROWS: 1, Fp8Scaling.BLOCKS: 2}
WHOLE = 8
"""Elements of 16 bytes: the copy engine (TMA) requires rows of a multiple of this."""
AHEAD = 256
"""Bytes of each row of a weight that are prefetched."""
AT_ONCE = 4
"""Blocks whose scales are loaded together, to hide the latency of memory, where the number of blocks and the shared
memory allow it. The kernel is written for exactly this many."""
ALIGNED = 16
"""Alignment of pointers, in bytes, for which Triton compiles kernels separately."""
ROOMY = 200_000
"""Bytes of shared memory of a program from which on AT_ONCE blocks fit; compute capabilities 8.9 and 12.0 have
101,376."""


# ---------------------------------------------------------------- the kernel


@triton.jit
def _ask(pointers):
    """Prefetch lines of 128 bytes into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _part(x_at, w_at, at, k, depth, real, FLIPPED: tl.constexpr, WHOLE: tl.constexpr):
    """Load (left operand, right operand) of DEPTH elements from `at` on."""
    if WHOLE:
        x = tl.load(x_at + at, mask=real[:, None], other=0.0)
        w = tl.load(w_at + at)
    else:
        inside = (at + k < depth)[None, :]
        x = tl.load(x_at + at, mask=real[:, None] & inside, other=0.0)
        w = tl.load(w_at + at, mask=inside, other=0.0)
    if FLIPPED:
        return w, tl.trans(x)
    else:
        return x, tl.trans(w)


@triton.jit
def _factors(by_row, by_block, at, x_stride, real, FLIPPED: tl.constexpr, BLOCK: tl.constexpr):
    """The scale of each element of the product of a block: that of its row times that of the weight's block."""
    found = tl.load(by_row + at // BLOCK * x_stride, mask=real, other=0.0) * tl.load(by_block + at // BLOCK)
    return found[None, :] if FLIPPED else found[:, None]


@triton.jit
def all_ended(count_ptr, SPLITS: tl.constexpr):
    """Count this program, whose sums are stored; whether it is the last one of SPLITS. It clears the count."""
    tl.debug_barrier()  # the sums of all threads are there before they are counted
    ended = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    if ended:
        tl.store(count_ptr, 0)  # for the next product
    return ended


@triton.jit(do_not_specialize=["rows", "x_stride"])
def _product_kernel(
    x_ptr, x_scales_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr, sums_ptr, counts_ptr, rows, columns, depth,
    x_stride, stride, SPLITS: tl.constexpr, SCALES: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    FLIPPED: tl.constexpr = ROWS < 64
    LINE: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth  # elements of 128 bytes
    tl.static_assert(AT_ONCE == 1 or AT_ONCE == 4)
    tl.static_assert(SPLITS == 1 or SCALES == 0)
    first = tl.program_id(0) * COLUMNS
    n = first + tl.arange(0, COLUMNS)
    # Lanes past the last column compute a column again, which is not stored. Lanes past the last row are masked
    # instead: to read a row again would cost as much as to read another one.
    w_row = weight_ptr + (n % columns).to(tl.int64)[:, None] * depth
    each = tl.cdiv(tl.cdiv(depth, DEPTH), SPLITS) * DEPTH
    begin = tl.program_id(2) * each
    if EARLY and AHEAD > 0:
        asked = tl.minimum(begin, depth - AHEAD // 128 * LINE)
        _ask(w_row + asked + (tl.arange(0, AHEAD // 128) * LINE)[None, :])
    wait(EARLY)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    real = m < rows
    x_at = x_ptr + m.to(tl.int64)[:, None] * depth + k[None, :]
    w_at = w_row + k[None, :]
    acc = tl.zeros([COLUMNS, ROWS] if FLIPPED else [ROWS, COLUMNS], tl.float32)
    by_row = x_scales_ptr + m
    if SCALES == 2:
        # The scales of the next blocks are loaded one iteration ahead.
        by_block = scales_ptr + first // BLOCK * stride
        a = _factors(by_row, by_block, 0, x_stride, real, FLIPPED, BLOCK)
        if AT_ONCE == 4:
            b = _factors(by_row, by_block, DEPTH, x_stride, real, FLIPPED, BLOCK)
            c = _factors(by_row, by_block, 2 * DEPTH, x_stride, real, FLIPPED, BLOCK)
            d = _factors(by_row, by_block, 3 * DEPTH, x_stride, real, FLIPPED, BLOCK)
        for at in range(0, depth, AT_ONCE * DEPTH):
            after = tl.minimum(at + AT_ONCE * DEPTH, depth - 1)
            next_a = _factors(by_row, by_block, after, x_stride, real, FLIPPED, BLOCK)
            left, right = _part(x_at, w_at, at, k, depth, real, FLIPPED, WHOLE)
            acc += tl.dot(left, right) * a
            a = next_a
            if AT_ONCE == 4:
                after = tl.minimum(at + AT_ONCE * DEPTH, depth - AT_ONCE * DEPTH)
                next_b = _factors(by_row, by_block, after + DEPTH, x_stride, real, FLIPPED, BLOCK)
                next_c = _factors(by_row, by_block, after + 2 * DEPTH, x_stride, real, FLIPPED, BLOCK)
                next_d = _factors(by_row, by_block, after + 3 * DEPTH, x_stride, real, FLIPPED, BLOCK)
                left, right = _part(x_at, w_at, at + DEPTH, k, depth, real, FLIPPED, WHOLE)
                acc += tl.dot(left, right) * b
                left, right = _part(x_at, w_at, at + 2 * DEPTH, k, depth, real, FLIPPED, WHOLE)
                acc += tl.dot(left, right) * c
                left, right = _part(x_at, w_at, at + 3 * DEPTH, k, depth, real, FLIPPED, WHOLE)
                acc += tl.dot(left, right) * d
                b, c, d = next_b, next_c, next_d
    else:
        for at in range(begin, tl.minimum(begin + each, depth), DEPTH):
            left, right = _part(x_at, w_at, at, k, depth, real, FLIPPED, WHOLE)
            acc = tl.dot(left, right, acc, input_precision="ieee")
    if FLIPPED:
        acc = tl.trans(acc)
    if SPLITS > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        kept = sums_ptr + tile * (SPLITS * ROWS * COLUMNS) + tl.arange(0, ROWS)[:, None] * COLUMNS
        kept += tl.arange(0, COLUMNS)[None, :]
        tl.store(kept + tl.program_id(2) * (ROWS * COLUMNS), acc, mask=real[:, None])
        if not all_ended(counts_ptr + tile, SPLITS):
            return
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for split in tl.static_range(SPLITS):  # all are loaded before the first one is there
            acc += tl.load(kept + split * (ROWS * COLUMNS), mask=real[:, None], other=0.0, cache_modifier=".cg")
    if SCALES == 1:
        of_rows = tl.load(by_row, mask=real, other=0.0)
        acc *= of_rows[:, None] * tl.load(scales_ptr + n % columns)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    out_at = out_ptr + m.to(tl.int64)[:, None] * columns + n[None, :]
    stored = real[:, None] & (n < columns)[None, :]
    if ADD:
        acc += tl.load(out_at, mask=stored, other=0.0).to(tl.float32)
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=stored)


_kernel_caches: dict[tuple[Any, ...], KernelCache] = {}
"""By everything that the kernel is compiled for and that may differ between calls. (Steps without graphs launch it for
every layer.)"""
MAX_TILES = 4096
"""The most tiles whose K can be divided."""


@functools.cache
def split_counts(device: torch.device) -> torch.Tensor:
    """int32[MAX_TILES], programs of each tile that have ended: all 0 before and after a product. Created where kernels
    are compiled, which is before graphs are captured."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def multiply(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, tile: Tile, *, splits: int = 1,
    bias: torch.Tensor | None = None, add: bool = False, scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    fp8_scaling: Fp8Scaling | None = None,
) -> None:  # fmt: skip
    """Write x[T, K] times weight[N, K] transposed, plus bias[N], to out[T, N], or with `add` add it there. All are
    contiguous. Sums are float32, except those of FP8, which are as wide as the tensor cores' accumulators. With a
    `fp8_scaling`, `scales` are those of x and of the weight (see `layers.fp8`); with block scales, `tile.depth` must
    be that of a block. If the tile's stages do not fit the shared memory, fewer are used. Without an `fp8_scaling`,
    `splits` programs can have a part of K each."""
    (rows, depth), columns = x.shape, len(weight)
    of_x, of_weight = (x, weight) if scales is None else scales
    more = out if bias is None else bias
    at_once = blocks_at_once(tile, depth, room()) if fp8_scaling is Fp8Scaling.BLOCKS else 1
    across, down = triton.cdiv(columns, tile.columns), triton.cdiv(rows, tile.rows)
    sums = counts = out
    if splits > 1:
        assert across * down <= MAX_TILES
        sums = torch.empty(splits * across * down * tile.rows * tile.columns, dtype=torch.float32, device=x.device)
        counts = split_counts(x.device)
    pointers = x, of_x, weight, of_weight, more, out, sums, counts
    kinds = (
        splits,
        SCALES[fp8_scaling],
        bias is not None,
        add,
        depth % tile.depth == 0,
        tile.rows,
        tile.columns,
        tile.depth,
        at_once,
        BLOCK,
        AHEAD if depth * weight.itemsize >= AHEAD else 0,
    )
    cache = None
    if all(pointer.data_ptr() % ALIGNED == 0 for pointer in pointers):
        given = x.device, x.dtype, weight.dtype, more.dtype, out.dtype, columns, depth, of_weight.stride(0), tile
        cache = _kernel_caches.setdefault((*given, *kinds), {})
    launch(
        _product_kernel, (across, down, splits), cache,
        *pointers, rows, columns, depth, of_x.stride(1), of_weight.stride(0), *kinds,
        num_warps=tile.warps, num_stages=stages(tile, at_once * weight.itemsize, room()),
    )  # fmt: skip


# ---------------------------------------------------------------- tiles


def blocks_at_once(tile: Tile, depth: int, memory: int) -> int:
    """Scale blocks that a tile loads together (AT_ONCE or 1), with `memory` bytes of shared memory."""
    few = tile.columns < BLOCK and memory >= ROOMY
    return AT_ONCE if few and depth % (AT_ONCE * tile.depth) == 0 else 1


def stages(tile: Tile, itemsize: int, memory: int) -> int:
    """Pipeline stages of a tile: as many as the tile has, or as fit `memory` bytes of shared memory, with a buffer
    each."""
    return max(1, min(tile.stages, memory // ((tile.rows + tile.columns) * tile.depth * itemsize)))


STREAMED = 16, 32
"""Rows of the tiles for few rows, which stream a weight."""
COLUMNS, BYTES = 64, 256
"""Rows of the weight in such a tile, and bytes of each row."""


def streaming(rows: int, columns: int, itemsize: int, device: torch.device) -> Tile:
    """The tile of `rows` (of STREAMED) rows for a weight [columns, K]: with 8 pipeline stages where each program has a
    multiprocessor of its own, with 4 where two or more share one (bench/products.py)."""
    alone = triton.cdiv(columns, COLUMNS) <= num_sms(device)
    return Tile(rows, COLUMNS, BYTES // itemsize, 4, 8 if alone else 4)


MAX_SPLITS, MIN_SPLITS, MIN_SPLIT_BLOCKS = 8, 3, 2
"""Limits of `splits_for`: splits of a product, and steps along K of a split (bench/splits.py)."""


@functools.cache
def splits_for(columns: int, depth: int, device: torch.device) -> int:
    """The number of programs that divide K of a weight [columns, depth] of 16 bits in the tiles of `streaming`: as many
    as there are multiprocessors for, if that is at least MIN_SPLITS. (With half of the multiprocessors a weight is
    read as fast as with two splits.)"""
    blocks = triton.cdiv(depth, BYTES // 2)
    most = min(MAX_SPLITS, num_sms(device) // triton.cdiv(columns, COLUMNS), blocks // MIN_SPLIT_BLOCKS)
    if most < MIN_SPLITS:
        return 1
    return triton.cdiv(blocks, triton.cdiv(blocks, most))  # none without steps


@functools.cache
def tile_for(rows: int, columns: int, depth: int, device: torch.device) -> Tile | None:
    """The tile for x[rows, depth] and weight[columns, depth] of 16 bits; None where torch's product is faster, or where
    it was not measured: this is for Hopper."""
    if not 0 < rows <= STREAMED[-1] or not of_hopper(device) or depth % (BYTES // 4):
        return None
    tile = streaming(next(most for most in STREAMED if rows <= most), columns, 2, device)
    splits = splits_for(columns, depth, device)
    return replace(tile, stages=4) if splits > 1 and depth < splits * tile.depth * tile.stages else tile


@functools.cache
def of_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def small_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None, add: bool = False
) -> torch.Tensor | None:
    """See `Ops.small_linear`."""
    if len(x) > STREAMED[-1] or x.dim() != 2 or x.itemsize != 2 or weight.dtype != x.dtype:
        return None
    tile = tile_for(len(x), *weight.shape, x.device)
    if tile is None or not (x.is_contiguous() and weight.is_contiguous() and (out is None or out.is_contiguous())):
        return None
    if out is None:
        out = x.new_empty((len(x), len(weight)))
    multiply(x, weight, out, tile, splits=splits_for(*weight.shape, x.device), bias=bias, add=add)
    return out


# ---------------------------------------------------------------- products of many rows with a gate

MIN_GATED_ROWS = 1024
"""The fewest rows for which one kernel may compute a product and its gate (bench/gated.py)."""
GATE = 240
"""Cost of the separate gate, as the depth K of a product that takes as long: for each inner feature the gate moves
three values of 2 bytes, at the bandwidth of an H200; the product is of two, gate and up, at its FLOP rate."""
WORTH = 0.975
"""See `gates`."""


def gated_linear(x: torch.Tensor, weight: torch.Tensor, activation: str) -> torch.Tensor | None:
    """See `Ops.gated_linear`."""
    if len(x) < MIN_GATED_ROWS or x.dim() != 2 or not (x.dtype == weight.dtype == torch.bfloat16):
        return None
    if x.shape[1] % WHOLE or len(weight) // 2 % WHOLE or not (x.is_contiguous() and weight.is_contiguous()):
        return None
    # Loaded in the first step of many rows even if it is not used there: it is tried out, which must not be captured.
    kernel = _hopper_gated(x.device) if of_hopper(x.device) else None
    if kernel is None or not gates(len(x), len(weight) // 2, x.shape[1], num_sms(x.device)):
        return None
    return kernel.product(x, weight, activation)


def gates(rows: int, inner: int, depth: int, programs: int) -> bool:
    """Whether one kernel is faster for the product of x[rows, depth] and weight[2 inner, depth] and its gate. The tiles
    are computed in rounds of `programs`, and if the last round is not full, that may cost more than the gate saves. The
    condition is

        tiles / (programs * ceil(tiles / programs)) * (1 + GATE / depth) >= WORTH
    """
    tiles = triton.cdiv(rows, GATED_TILE[0]) * triton.cdiv(inner, GATED_TILE[1])
    return tiles / (programs * triton.cdiv(tiles, programs)) * (1 + GATE / depth) >= WORTH


@functools.cache
def _hopper_gated(device: torch.device) -> ModuleType | None:
    """`hopper_gated`; None if it cannot be used."""
    try:
        from radixrt.worker.cuda.linear import hopper_gated
    except (ImportError, AttributeError):  # a Triton without Gluon, or with another version of it
        return None
    return hopper_gated if hopper_gated.there(device) else None
