"""LoRA adapters, out[T, N] += factor * B(A x) with the A and B of each row's adapter.

    once a forward pass   sort rows by adapter; list tiles of up to ROWS rows of one adapter
    shrink                inner[splits, T, P * rank] = x[T, K] A', each split over a part of K
    expand                out[T, N] += factor * (sum of splits) B'

Rows without an adapter are in no tile: they are neither multiplied nor written. The number of programs depends on the
number of rows alone, and those for which there is no tile end at once, so that all of this can be captured.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.elementwise.launching import launch, wait
from radixrt.worker.cuda.linear.gemm import Tile
from radixrt.worker.model.lora.lora import Rows, Stack

SMALL_TILES = Tile(16, 32, 256, 4, 3), Tile(16, 128, 64, 4, 2)
"""(shrink, expand) for few rows. The depth of shrink is along K, that of expand along the rank."""
LARGE_TILES = Tile(64, 64, 64, 4, 4), Tile(64, 128, 64, 4, 2)
MAX_SMALL_ROWS = 512
"""The most rows that are computed with SMALL_TILES."""
PROGRAMS = 132
"""Shrink has about this many programs at least, if K can be split so: the multiprocessors of an H100."""
MAX_SPLITS = 16
EXACT_SPLITS = 4
"""Splits if results must not depend on the batch."""
EXPANDING = 8 * PROGRAMS
"""Expand has about this many programs at most, each for several tiles of columns."""
FIELDS = 3
"""Of a tile of rows: its adapter, its first place in the order, the end of its places."""


# ---------------------------------------------------------------- which rows belong together


@dataclass(frozen=True, slots=True)
class Work:
    """Tiles of rows, each of one adapter."""

    order: torch.Tensor
    """int64[T]: rows sorted by adapter."""
    tiles: torch.Tensor
    """int32[most, FIELDS]; in those after the last one the adapter is -1."""


@triton.jit(do_not_specialize=["rows", "most"])
def _list_kernel(
    sorted_ptr, tiles_ptr, rows, adapters, most, ROWS: tl.constexpr, ADAPTERS: tl.constexpr, BLOCK: tl.constexpr,
    FIELDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    adapter = tl.arange(0, ADAPTERS)
    low, high = tl.zeros([ADAPTERS], tl.int32), tl.zeros([ADAPTERS], tl.int32) + rows
    low_end, high_end = low, high
    size = rows
    while size > 0:  # binary search for the first row of each adapter, and for the first one after it
        middle = (low + high) // 2
        before = tl.load(sorted_ptr + middle, mask=low < high, other=1 << 30) < adapter
        low, high = tl.where(before, middle + 1, low), tl.where(before, high, tl.maximum(low, middle))
        middle = (low_end + high_end) // 2
        before = tl.load(sorted_ptr + middle, mask=low_end < high_end, other=1 << 30) <= adapter
        low_end = tl.where(before, middle + 1, low_end)
        high_end = tl.where(before, high_end, tl.maximum(low_end, middle))
        size = size // 2
    count = tl.where(adapter < adapters, (low_end - low + ROWS - 1) // ROWS, 0)
    after = tl.cumsum(count, 0)
    for number in range(tl.max(count, axis=0)):
        tile = tiles_ptr + (after - count + number) * FIELDS
        mask = number < count
        first = low + number * ROWS
        tl.store(tile, adapter, mask=mask)
        tl.store(tile + 1, first, mask=mask)
        tl.store(tile + 2, tl.minimum(first + ROWS, low_end), mask=mask)
    for begin in range(tl.max(after, axis=0), most, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        tl.store(tiles_ptr + place * FIELDS, -1, mask=place < most)


def work(rows: Rows, adapters: int, tile_rows: int) -> Work:
    """The tiles of up to `tile_rows` rows; there are matrices of so many `adapters`. Made once a forward pass."""
    known = rows.kept.get(tile_rows)
    if known is None:
        assert rows.adapters is not None
        count = len(rows.adapters)
        adapter_of, order = rows.adapters.sort(stable=True)
        most = min(count, count // tile_rows + min(adapters, count))
        tiles = torch.empty((most, FIELDS), dtype=torch.int32, device=adapter_of.device)
        launch(
            _list_kernel, (1, 1, 1), None, adapter_of, tiles, count, adapters, most, tile_rows,
            triton.next_power_of_2(adapters), 256, FIELDS, num_warps=4,
        )  # fmt: skip
        known = rows.kept[tile_rows] = Work(order, tiles)
    return known


# ---------------------------------------------------------------- products


@triton.jit
def _tile(tiles_ptr, number, FIELDS: tl.constexpr):
    """(adapter, first place in the order, end)."""
    at = tiles_ptr + number * FIELDS
    return tl.load(at).to(tl.int64), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def _rows(order_ptr, first, end, ROWS: tl.constexpr):
    """(places in the order, whether these belong to the tile, rows)."""
    m = first + tl.arange(0, ROWS)
    real = m < end
    return m, real, tl.load(order_ptr + m, mask=real, other=0)


@triton.jit(do_not_specialize=["rows", "blocks"])
def _shrink_kernel(
    x_ptr, a_ptr, tiles_ptr, order_ptr, inner_ptr, rows, depth, columns, x_stride, blocks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WHOLE: tl.constexpr, FIELDS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(2)
    wait(EARLY)
    adapter, first, last = _tile(tiles_ptr, tl.program_id(1), FIELDS)
    if adapter >= 0:
        m, real, row = _rows(order_ptr, first, last, ROWS)
        k = tl.arange(0, DEPTH)
        x_at = x_ptr + row[:, None] * x_stride + k[None, :]
        a_at = a_ptr + (adapter * columns + n % columns)[:, None] * depth + k[None, :]
        last_block = tl.minimum(tl.cdiv(depth, DEPTH), (split + 1) * blocks)
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for block in range(split * blocks, last_block):
            at = block * DEPTH
            if WHOLE:  # a mask of columns would prevent wide loads, and loads ahead
                x = tl.load(x_at + at, mask=real[:, None], other=0.0)
                a = tl.load(a_at + at)
            else:
                inside = (at + k < depth)[None, :]
                x = tl.load(x_at + at, mask=real[:, None] & inside, other=0.0)
                a = tl.load(a_at + at, mask=inside, other=0.0)
            acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
        out = inner_ptr + (split * rows + m).to(tl.int64)[:, None] * columns + n[None, :]
        tl.store(out, acc, mask=real[:, None] & (n < columns)[None, :])


@triton.jit(do_not_specialize=["rows", "splits"])
def _expand_kernel(
    inner_ptr, b_ptr, tiles_ptr, order_ptr, spans_ptr, out_ptr, factor, rows, rank, ranks, columns, out_stride,
    splits,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WHOLE: tl.constexpr, FIELDS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    span = spans_ptr + 3 * tl.program_id(0)
    place, begin, stop = tl.load(span), tl.load(span + 1), tl.load(span + 2)
    wait(EARLY)
    adapter, first, last = _tile(tiles_ptr, tl.program_id(1), FIELDS)
    if adapter >= 0:
        m, real, row = _rows(order_ptr, first, last, ROWS)
        if WHOLE:
            begin = tl.multiple_of(begin, COLUMNS)
        r = tl.arange(0, DEPTH)
        inner_at = inner_ptr + m.to(tl.int64)[:, None] * ranks + place * rank + r[None, :]
        for column in range(begin, stop, COLUMNS):
            n = column + tl.arange(0, COLUMNS)
            inside = n < stop
            b_at = b_ptr + (adapter * columns + n)[:, None] * rank + r[None, :]
            acc = tl.zeros([ROWS, COLUMNS], tl.float32)
            for at in range(0, rank, DEPTH):
                b = tl.load(b_at + at) if WHOLE else tl.load(b_at + at, mask=inside[:, None], other=0.0)
                inner = tl.zeros([ROWS, DEPTH], tl.float32)
                for split in range(splits):
                    inner += tl.load(inner_at + split * rows * ranks + at, mask=real[:, None], other=0.0)
                acc = tl.dot(inner.to(b.dtype), tl.trans(b), acc, input_precision="ieee")
            out = out_ptr + row[:, None] * out_stride + n[None, :]
            mask = real[:, None] if WHOLE else real[:, None] & inside[None, :]
            before = tl.load(out, mask=mask, other=0.0).to(tl.float32)
            tl.store(out, (before + factor * acc).to(out_ptr.dtype.element_ty), mask=mask)


def lora(x: torch.Tensor, stack: Stack, rows: Rows, out: torch.Tensor, factor: float, batch_invariant: bool) -> None:
    """See `Ops.lora`. The columns of x and `out` must be next to each other in memory."""
    count, _ = x.shape
    if not count:
        return
    assert x.stride(1) == out.stride(1) == 1
    down, up = SMALL_TILES if batch_invariant or count <= MAX_SMALL_ROWS else LARGE_TILES
    found = work(rows, len(stack.a), down.rows)
    splits = EXACT_SPLITS if batch_invariant else best_splits(len(found.tiles), stack, down)
    expand(shrink(x, stack, found, down, splits), stack, found, out, factor, up)


def best_splits(tiles: int, stack: Stack, tile: Tile) -> int:
    """Parts of K for so many tiles of rows."""
    _, ranks, depth = stack.a.shape
    return max(1, min(MAX_SPLITS, PROGRAMS // (tiles * triton.cdiv(ranks, tile.columns)), depth // tile.depth))


def shrink(x: torch.Tensor, stack: Stack, found: Work, tile: Tile, splits: int) -> torch.Tensor:
    """float32[splits, T, P * rank]: parts of A x, by place in the order; undefined for rows without an adapter."""
    (count, depth), ranks = x.shape, stack.a.shape[1]
    columns = min(tile.columns, triton.next_power_of_2(ranks))
    blocks = triton.cdiv(triton.cdiv(depth, tile.depth), splits)
    inner = torch.empty((splits, count, ranks), dtype=torch.float32, device=x.device)
    launch(
        _shrink_kernel, (triton.cdiv(ranks, columns), len(found.tiles), splits), None,
        x, stack.a, found.tiles, found.order, inner, count, depth, ranks, x.stride(0), blocks,
        tile.rows, columns, tile.depth, depth % tile.depth == 0, FIELDS, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return inner


def expand(inner: torch.Tensor, stack: Stack, found: Work, out: torch.Tensor, factor: float, tile: Tile) -> None:
    """Add factor * B of what `shrink` returned to out[T, N]."""
    (splits, count, ranks), (_, columns, rank) = inner.shape, stack.b.shape
    together = len(found.tiles) * triton.cdiv(columns, tile.columns) // EXPANDING
    width = tile.columns * (1 << max(0, together.bit_length() - 1))  # powers of two, so that there are few lists
    spans = _spans(stack.sizes, width, out.device)
    launch(
        _expand_kernel, (len(spans), len(found.tiles), 1), None,
        inner, stack.b, found.tiles, found.order, spans, out, factor, count, rank, ranks, columns, out.stride(0),
        splits, tile.rows, tile.columns, _largest_divisor(rank, tile.depth),
        all(size % tile.columns == 0 for size in stack.sizes), FIELDS, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _largest_divisor(rank: int, most: int) -> int:
    """The largest power of two, at most `most`, that divides a rank."""
    return min(rank & -rank, most)


@functools.cache
def _spans(sizes: tuple[int, ...], width: int, device: torch.device) -> torch.Tensor:
    """int32[spans, 3]: (projection, first column, end) of parts of the result of at most `width` columns."""
    found, begin = [], 0
    for place, size in enumerate(sizes):
        end = begin + size
        found += [(place, first, min(first + width, end)) for first in range(begin, end, width)]
        begin = end
    return torch.tensor(found, dtype=torch.int32, device=device)
