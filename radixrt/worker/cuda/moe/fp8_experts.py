"""Products of experts in FP8 (`layers.moe.ScaledStack`), by tiles of rows of one expert (see `experts`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.elementwise.launching import launch, wait
from radixrt.worker.cuda.linear.gemm import Tile
from radixrt.worker.cuda.linear.invariant import GROUP
from radixrt.worker.model.layers.fp8 import BLOCK, Fp8Activations, Fp8Scaling
from radixrt.worker.model.layers.moe import ScaledStack

if TYPE_CHECKING:
    from radixrt.worker.cuda.moe.routing import Order

TILE_16, TILE_32, TILE_64 = Tile(16, 64, 128, 4, 3), Tile(32, 64, 128, 4, 3), Tile(64, 128, 128, 4, 3)
"""Tiles for few to many rows of an expert, as deep as a scale block; see `tile_for` (bench/experts.py --sweep)."""
TILE_16_DEEP, TILE_128 = Tile(16, 64, 256, 4, 4), Tile(128, 128, 128, 4, 3)
"""Further tiles for row scales. (With block scales, each block's sum is added to another one, which takes too many
registers for 128 rows.)"""


def tile_for(rows: float, *weights: ScaledStack) -> Tile:
    """The tile for products of `weights`, for `rows` rows per expert on average."""
    by_rows = all(weight.fp8_scaling is Fp8Scaling.ROWS for weight in weights)
    if by_rows and (rows <= 0.25 or rows > 64):
        return TILE_16_DEEP if rows <= 0.25 else TILE_128
    return TILE_16 if rows <= 6 else TILE_32 if rows <= 24 else TILE_64


@triton.jit(do_not_specialize=["tiles", "x_stride", "stride"])
def _product_kernel(
    x_ptr, x_scales_ptr, rows_ptr, tiles_ptr, weight_ptr, scales_ptr, out_ptr, tiles, columns, depth, x_stride, stride,
    BLOCKS: tl.constexpr, OF_TOKENS: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    # Hopper's tensor cores need a multiple of 64 rows of the left operand: with few rows the weight is on the left.
    FLIPPED: tl.constexpr = ROWS < 64
    across = tl.cdiv(columns, COLUMNS)
    group = tl.program_id(0) // (GROUP * across)
    within = tl.program_id(0) % (GROUP * across)
    high = tl.minimum(tiles - group * GROUP, GROUP)
    tile = tiles_ptr + (group * GROUP + within % high) * FIELDS
    count = tl.load(tile + 2)
    if count == 0:
        return
    expert = tl.load(tile).to(tl.int64)
    first = within // high * COLUMNS
    m = tl.arange(0, ROWS)
    n = first + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    real = m < count
    # Lanes past the last column compute a column again, which is not stored. Lanes past the last row are masked
    # instead: to read a row again would cost as much as to read another one.
    row = tl.load(tile + 1) + tl.where(real, m, 0)
    source = (tl.load(rows_ptr + row) if OF_TOKENS else row).to(tl.int64)
    x_at = x_ptr + source[:, None] * depth + k[None, :]
    w_at = weight_ptr + expert * columns * depth + (n % columns)[:, None] * depth + k[None, :]
    acc = tl.zeros([COLUMNS, ROWS] if FLIPPED else [ROWS, COLUMNS], tl.float32)
    by_row = x_scales_ptr + source
    by_block = scales_ptr + (expert * tl.cdiv(columns, BLOCK) + first // BLOCK) * stride
    if BLOCKS:
        of_rows, of_block = tl.load(by_row, mask=real, other=0.0), tl.load(by_block)
    for begin in range(0, depth, DEPTH):
        if WHOLE:
            x = tl.load(x_at + begin, mask=real[:, None], other=0.0)
            w = tl.load(w_at + begin)
        else:
            inside = begin + k < depth
            x = tl.load(x_at + begin, mask=real[:, None] & inside[None, :], other=0.0)
            w = tl.load(w_at + begin, mask=inside[None, :], other=0.0)
        if BLOCKS:
            # The scales of the next block are loaded one iteration ahead, to hide their latency. (Two iterations ahead
            # would keep the compiler from prefetching x and w.)
            after = tl.minimum(begin + DEPTH, depth - 1) // BLOCK
            next_rows = tl.load(by_row + after * x_stride, mask=real, other=0.0)
            next_block = tl.load(by_block + after)
            if FLIPPED:
                acc += tl.dot(w, tl.trans(x)) * (of_rows * of_block)[None, :]
            else:
                acc += tl.dot(x, tl.trans(w)) * (of_rows * of_block)[:, None]
            of_rows, of_block = next_rows, next_block
        elif FLIPPED:
            acc = tl.dot(w, tl.trans(x), acc)
        else:
            acc = tl.dot(x, tl.trans(w), acc)
    if FLIPPED:
        acc = tl.trans(acc)
    if not BLOCKS:
        of_columns = tl.load(scales_ptr + expert * columns + n % columns)
        acc *= tl.load(by_row, mask=real, other=0.0)[:, None] * of_columns[None, :]
    at = out_ptr + row.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=real[:, None] & (n < columns)[None, :])


def product(
    x: Fp8Activations, order: Order, weight: ScaledStack, tile: Tile, dtype: torch.dtype, of_tokens: bool = False
) -> torch.Tensor:
    """Multiply x, sorted by expert as `order` says, by each expert's weight[E, N, K] transposed: [T * chosen, N] in
    `dtype`. x is [T * chosen, K], or with `of_tokens` [T, K] (rows are then looked up). `order` must have tiles of
    `tile.rows`; with block scales, `tile.depth` must be that of a block."""
    _, columns, depth = weight.values.shape
    out = torch.empty((len(order.tokens), columns), dtype=dtype, device=x.values.device)
    launch(
        _product_kernel, (len(order.tiles) * triton.cdiv(columns, tile.columns),), None,
        x.values, x.scales, order.tokens, order.tiles, weight.values, weight.scales, out, len(order.tiles), columns,
        depth, x.scales.stride(1), weight.scales.stride(1), weight.fp8_scaling is Fp8Scaling.BLOCKS, of_tokens,
        depth % tile.depth == 0, tile.rows, tile.columns, tile.depth, order.tiles.shape[1], BLOCK, GROUP,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out
