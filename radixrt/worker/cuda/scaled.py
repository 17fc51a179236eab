"""Products of weights in FP8 (`model.scaled`): y[T, N] = x[T, K] times weight[N, K] transposed, both with their scales.

Few rows take as long as it takes to read the weight, which a kernel of our own does at most of the bandwidth; many rows
go to torch's products (cuBLASLt, CUTLASS), which those with scales of blocks have on Hopper alone.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from radixrt.worker.cuda.invariant import Tile
from radixrt.worker.cuda.launching import launch, wait
from radixrt.worker.cuda.rounding import padded, quantize
from radixrt.worker.model.scaled import BLOCK, Rounded, Rounding, Scaled

FEW, SOME = Tile(16, 32, 256, 4, 6), Tile(64, 32, 256, 4, 4)
"""For up to 16 rows and for up to MOST_ROWS, where scales are of rows (bench/scaled.py --sweep)."""
FEW_BLOCKS, SOME_BLOCKS = Tile(16, 64, 128, 4, 4), Tile(64, 64, 128, 4, 3)
"""Where they are of blocks."""
FEW_WIDE, SOME_WIDE = Tile(16, 128, 128, 4, 4), Tile(64, 128, 128, 4, 4)
"""Of either kind, for weights of at least WIDE rows."""
WIDE = 16384
MOST_ROWS = 64
"""That are few."""
AT_ONCE = 4
"""Blocks, where the number of them allows it, and the shared memory."""
ROOMY = 200_000
"""Bytes of shared memory of a multiprocessor that hold so many; compute capabilities 8.9 and 12.0 have 102,400."""


@triton.jit(do_not_specialize=["rows", "x_stride"])
def _product_kernel(
    x_ptr, x_scales_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr, rows, columns, depth, x_stride, stride,
    BLOCKS: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(0) * COLUMNS
    n = first + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    real = m < rows
    # Lanes past the end compute a column again, which is not stored; to read a row again costs as much as another one.
    x_at = x_ptr + m.to(tl.int64)[:, None] * depth + k[None, :]
    w_at = weight_ptr + (n % columns).to(tl.int64)[None, :] * depth + k[:, None]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    by_row, by_block = x_scales_ptr + m, scales_ptr + first // BLOCK * stride
    for begin in range(0, depth, DEPTH * AT_ONCE):
        for part in tl.static_range(AT_ONCE):
            at = begin + part * DEPTH
            if WHOLE:
                x = tl.load(x_at + at, mask=real[:, None], other=0.0)
                w = tl.load(w_at + at)
            else:
                inside = at + k < depth
                x = tl.load(x_at + at, mask=real[:, None] & inside[None, :], other=0.0)
                w = tl.load(w_at + at, mask=inside[:, None], other=0.0)
            if BLOCKS:
                of_rows = tl.load(by_row + at // BLOCK * x_stride, mask=real, other=0.0)
                acc += tl.dot(x, w) * (of_rows * tl.load(by_block + at // BLOCK))[:, None]
            else:
                acc = tl.dot(x, w, acc)
    if not BLOCKS:
        of_rows = tl.load(by_row, mask=real, other=0.0)
        acc *= of_rows[:, None] * tl.load(scales_ptr + n % columns)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    out_at = out_ptr + m.to(tl.int64)[:, None] * columns + n[None, :]
    stored = real[:, None] & (n < columns)[None, :]
    if ADD:
        acc += tl.load(out_at, mask=stored, other=0.0).to(tl.float32)
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=stored)


def product(
    x: Rounded, weight: Scaled, bias: torch.Tensor | None, out: torch.Tensor, tile: Tile, add: bool = False
) -> None:
    """Write the product plus bias[N] to out[T, N], or add it there. With scales of blocks a tile has their depth."""
    rows, (columns, depth) = len(x), weight.values.shape
    blocks = weight.rounding is Rounding.BLOCKS
    at_once = blocks_at_once(tile, depth, shared_memory(weight.values.device)) if blocks else 1
    launch(
        _product_kernel, (triton.cdiv(columns, tile.columns), triton.cdiv(rows, tile.rows)), None,
        x.values, x.scales, weight.values, weight.scales, out if bias is None else bias, out, rows, columns, depth,
        x.scales.stride(1), weight.scales.stride(0), blocks, bias is not None, add, depth % tile.depth == 0,
        tile.rows, tile.columns, tile.depth, at_once, BLOCK, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def blocks_at_once(tile: Tile, depth: int, room: int) -> int:
    """Where programs are few, scales of some blocks are asked for together: each costs a way to memory. `room`: bytes
    of shared memory of a multiprocessor."""
    few = tile.columns < BLOCK and room >= ROOMY
    return AT_ONCE if few and depth % (AT_ONCE * tile.depth) == 0 else 1


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of a multiprocessor; ROOMY where there is no GPU."""
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor if device.type == "cuda" else ROOMY


def tile_for(rows: int, weight: Scaled) -> Tile | None:
    """None: torch's products are faster."""
    columns, depth = weight.values.shape
    by_rows = weight.rounding is Rounding.ROWS
    if rows > MOST_ROWS and weight.values.is_cuda:
        if by_rows or (columns % BLOCK == depth % BLOCK == 0 and blocks_by_torch(weight.values.device)):
            return None
    few = rows <= FEW.rows
    if columns >= WIDE or rows > MOST_ROWS:
        return FEW_WIDE if few else SOME_WIDE
    if by_rows:
        return FEW if few else SOME
    return FEW_BLOCKS if few else SOME_BLOCKS


@functools.cache
def blocks_by_torch(device: torch.device) -> bool:
    """cuBLASLt has products with scales of blocks on Hopper alone, and from CUDA 12.9 on."""
    cuda = tuple(int(number) for number in (torch.version.cuda or "0").split(".")[:2])
    return cuda >= (12, 9) and torch.cuda.get_device_capability(device) == (9, 0)


def scaled(
    x: torch.Tensor | Rounded,
    weight: Scaled,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `Ops.scaled`."""
    known = x if isinstance(x, Rounded) else quantize(x, weight.rounding)
    tile = tile_for(len(known), weight)
    if tile is None:
        out = _by_torch(known, weight, bias, dtype)
        return out if residual is None else residual.add_(out)
    out = residual
    if out is None:
        out = torch.empty((len(known), len(weight.values)), dtype=dtype, device=known.values.device)
    if len(known):
        product(known, weight, bias, out, tile, add=residual is not None)
    return out


def _by_torch(x: Rounded, weight: Scaled, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if weight.rounding is Rounding.ROWS:
        # Sums as wide as tensor cores have them: to float32 it is as far as with wider ones, to the third digit.
        return torch._scaled_mm(
            x.values, weight.values.t(), x.scales, weight.scales.t(), bias=bias, out_dtype=dtype, use_fast_accum=True
        )
    kinds, whole = F.ScalingType, padded(x)
    out = F.scaled_mm(
        whole.values, weight.values.t(), whole.scales, kinds.BlockWise1x128, weight.scales.t(), kinds.BlockWise128x128,
        output_dtype=dtype,
    )[: len(x)]  # fmt: skip
    return out if bias is None else out.add_(bias)
