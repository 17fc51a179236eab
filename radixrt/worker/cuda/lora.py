"""LoRA adapters, out[T, N] += factor * B(A x) with the A and B of each row's adapter, by two kernels:

    shrink   inner[splits, T, P * rank] = x[T, K] A', each split over a part of K
    expand   out[T, N] += factor * (sum of splits) B'

Both take rows sorted by adapter (`Rows.order`), so that most tiles of rows have only one; a tile multiplies by the
matrices of each adapter that it has, and keeps the rows that have this one. Rows without an adapter are neither
multiplied nor written. So the kernels depend only on the numbers of the adapters on the device, and can be captured.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.launching import launch, wait
from radixrt.worker.model.lora import Rows, Stack


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program computes: rows x columns in steps of `depth`, and its launch parameters."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


FEW = Tile(16, 64, 128, 4, 4), Tile(16, 128, 64, 4, 2)
"""(shrink, expand) for few rows."""
MANY = Tile(64, 64, 64, 4, 4), Tile(64, 128, 64, 4, 3)
FEW_ROWS = 512
"""The most rows that are computed with FEW."""
PROGRAMS = 132
"""K is split so that there are at least about this many programs: the multiprocessors of an H100."""
MOST_SPLITS = 8
EXACT_SPLITS = 4
"""Splits if results must not depend on the batch."""
NO_ADAPTER = tl.constexpr(1 << 30)
"""A number larger than those of all adapters."""


@triton.jit
def _adapters(adapters_ptr, order_ptr, rows, ROWS: tl.constexpr, tile):
    """(positions in the order, rows, their adapters or -1) of a tile."""
    m = tile * ROWS + tl.arange(0, ROWS)
    real = m < rows
    row = tl.load(order_ptr + m, mask=real, other=0)
    return m, row, tl.load(adapters_ptr + row, mask=real, other=-1)


@triton.jit
def _after(adapters, last):
    """The smallest of `adapters` that is larger than `last`; NO_ADAPTER if there is none."""
    return tl.min(tl.where(adapters > last, adapters, NO_ADAPTER), axis=0)


@triton.jit(do_not_specialize=["rows", "part"])
def _shrink_kernel(
    x_ptr, a_ptr, adapters_ptr, order_ptr, inner_ptr, rows, depth, columns, x_stride, part,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(2)
    wait(EARLY)
    m, row, adapters = _adapters(adapters_ptr, order_ptr, rows, ROWS, tl.program_id(1))
    has = adapters >= 0
    k = tl.arange(0, DEPTH)
    x_at = x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    begin, end = split * part, tl.minimum(depth, (split + 1) * part)
    found = tl.zeros([ROWS, COLUMNS], tl.float32)
    adapter = _after(adapters, -1)
    while adapter < NO_ADAPTER:
        a_at = a_ptr + (adapter.to(tl.int64) * columns + n % columns)[:, None] * depth + k[None, :]
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for at in range(begin, end, DEPTH):
            inside = (at + k < end)[None, :]
            x = tl.load(x_at + at, mask=has[:, None] & inside, other=0.0)
            a = tl.load(a_at + at, mask=inside, other=0.0)
            acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
        found = tl.where((adapters == adapter)[:, None], acc, found)
        adapter = _after(adapters, adapter)
    out = inner_ptr + (split * rows + m).to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(out, found, mask=has[:, None] & (n < columns)[None, :])


@triton.jit(do_not_specialize=["rows", "splits"])
def _expand_kernel(
    inner_ptr, b_ptr, adapters_ptr, order_ptr, tiles_ptr, out_ptr, factor, rows, rank, ranks, columns, out_stride,
    splits,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    tile = tiles_ptr + 3 * tl.program_id(0)
    place, first, stop = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    n = first + tl.arange(0, COLUMNS)
    inside = n < stop
    wait(EARLY)
    m, row, adapters = _adapters(adapters_ptr, order_ptr, rows, ROWS, tl.program_id(1))
    has = adapters >= 0
    r = tl.arange(0, DEPTH)
    inner_at = inner_ptr + m.to(tl.int64)[:, None] * ranks + place * rank + r[None, :]
    found = tl.zeros([ROWS, COLUMNS], tl.float32)
    adapter = _after(adapters, -1)
    while adapter < NO_ADAPTER:
        b_at = b_ptr + (adapter.to(tl.int64) * columns + n)[:, None] * rank + r[None, :]
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for at in range(0, rank, DEPTH):
            b = tl.load(b_at + at, mask=inside[:, None], other=0.0)
            inner = tl.zeros([ROWS, DEPTH], tl.float32)
            for split in range(splits):
                inner += tl.load(inner_at + split * rows * ranks + at, mask=has[:, None], other=0.0)
            acc = tl.dot(inner.to(b.dtype), tl.trans(b), acc, input_precision="ieee")
        found = tl.where((adapters == adapter)[:, None], acc, found)
        adapter = _after(adapters, adapter)
    out = out_ptr + row.to(tl.int64)[:, None] * out_stride + n[None, :]
    mask = has[:, None] & inside[None, :]
    before = tl.load(out, mask=mask, other=0.0).to(tl.float32)
    tl.store(out, (before + factor * found).to(out_ptr.dtype.element_ty), mask=mask)


def lora(x: torch.Tensor, stack: Stack, rows: Rows, out: torch.Tensor, factor: float, batch_invariant: bool) -> None:
    """See `layers.Ops.lora`. The columns of x and `out` must be next to each other in memory."""
    count, depth = x.shape
    if not count:
        return
    assert x.stride(1) == out.stride(1) == 1
    down, up = FEW if batch_invariant or count <= FEW_ROWS else MANY
    splits = EXACT_SPLITS if batch_invariant else best_splits(count, stack, down)
    expand(shrink(x, stack, rows, down, splits), stack, rows, out, factor, up)


def best_splits(count: int, stack: Stack, tile: Tile) -> int:
    """Parts of K for so many rows."""
    _, ranks, depth = stack.a.shape
    programs = triton.cdiv(count, tile.rows) * triton.cdiv(ranks, tile.columns)
    return max(1, min(MOST_SPLITS, PROGRAMS // programs, depth // tile.depth))


def shrink(x: torch.Tensor, stack: Stack, rows: Rows, tile: Tile, splits: int) -> torch.Tensor:
    """float32[splits, T, P * rank]: parts of A x, by place in `rows.order`; undefined for rows without an adapter."""
    (count, depth), ranks = x.shape, stack.a.shape[1]
    columns = min(tile.columns, triton.next_power_of_2(ranks))
    part = triton.cdiv(triton.cdiv(depth, splits), tile.depth) * tile.depth
    inner = torch.empty((splits, count, ranks), dtype=torch.float32, device=x.device)
    launch(
        _shrink_kernel, (triton.cdiv(ranks, columns), triton.cdiv(count, tile.rows), splits), None,
        x, stack.a, rows.adapters, rows.order, inner, count, depth, ranks, x.stride(0), part,
        tile.rows, columns, tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return inner


def expand(
    inner: torch.Tensor, stack: Stack, rows: Rows, out: torch.Tensor, factor: float, tile: Tile
) -> None:  # fmt: skip
    """Add factor * B of what `shrink` returned to out[T, N]."""
    (splits, count, ranks), (_, columns, rank) = inner.shape, stack.b.shape
    tiles = _column_tiles(stack.sizes, tile.columns, out.device)
    launch(
        _expand_kernel, (len(tiles), triton.cdiv(count, tile.rows), 1), None,
        inner, stack.b, rows.adapters, rows.order, tiles, out, factor, count, rank, ranks, columns, out.stride(0),
        splits, tile.rows, tile.columns, _largest_divisor(rank, tile.depth), num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


def _largest_divisor(rank: int, most: int) -> int:
    """The largest power of two, at most `most`, that divides a rank."""
    return min(rank & -rank, most)


@functools.cache
def _column_tiles(sizes: tuple[int, ...], columns: int, device: torch.device) -> torch.Tensor:
    """int32[tiles, 3]: (projection, first column, end of the projection's columns) of each tile of the result."""
    found, begin = [], 0
    for place, size in enumerate(sizes):
        found += [(place, first, begin + size) for first in range(begin, begin + size, columns)]
        begin += size
    return torch.tensor(found, dtype=torch.int32, device=device)
