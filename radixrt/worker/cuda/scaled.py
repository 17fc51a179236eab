"""Products of weights in FP8 (`model.scaled`): y[T, N] = x[T, K] times weight[N, K] transposed, both with their scales.

Few rows take as long as it takes to read the weight, which a kernel of our own does at most of the bandwidth; many rows
go to torch's products (cuBLASLt, CUTLASS), which those with scales of blocks have on Hopper alone.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import triton
from torch.nn import functional as F

from radixrt.worker.cuda.products import STREAMED, Tile, multiply, of_hopper, processors, streaming
from radixrt.worker.cuda.rounding import padded, quantize
from radixrt.worker.model.scaled import BLOCK, Rounded, Rounding, Scaled

MOST_ROWS, MANY_ROWS = 64, 256
"""Those of tiles below, the second where each program has a multiprocessor of its own."""
ALONE, SOME, MORE = Tile(64, 32, 256, 4, 6), Tile(32, 64, 128, 4, 6), Tile(64, 64, 128, 4, 6)
"""For more than 16 rows and scales of rows, where each program has a multiprocessor of its own, and where not: for up
to 32 rows, and for more (bench/products.py)."""
MANY = Tile(64, 64, 256, 4, 6), Tile(128, 64, 128, 4, 8)
"""For more than MOST_ROWS, on Hopper: the first one that leaves each program a multiprocessor."""
BLOCKS_ALONE, BLOCKS, BLOCKS_WIDE = Tile(64, 32, 128, 4, 3), Tile(16, 64, 128, 4, 3), Tile(16, 128, 128, 4, 4)
"""With scales of blocks: for 17 to 32 rows where each program has a multiprocessor of its own, for weights of fewer
than WIDE rows, and for others; the latter two are as high as there are rows."""
WIDE = 16384


def product(
    x: Rounded, weight: Scaled, bias: torch.Tensor | None, out: torch.Tensor, tile: Tile, add: bool = False
) -> None:
    """Write the product plus bias[N] to out[T, N], or add it there. With scales of blocks a tile has their depth."""
    scales = x.scales, weight.scales
    multiply(x.values, weight.values, out, tile, bias=bias, add=add, scales=scales, rounding=weight.rounding)


def tile_for(rows: int, weight: Scaled) -> Tile | None:
    """None: torch's products are faster."""
    columns, depth = weight.values.shape
    device, few = weight.values.device, next((most for most in STREAMED if rows <= most), MOST_ROWS)
    beyond = rows > MOST_ROWS and _on_gpu(weight)
    if weight.rounding is Rounding.ROWS:
        if beyond:
            fitting = rows <= MANY_ROWS and of_hopper(device)
            return next((tile for tile in MANY if fitting and _alone(rows, columns, tile, device)), None)
        if few == STREAMED[0]:
            return streaming(few, columns, 1, device)
        return ALONE if _alone(rows, columns, ALONE, device) else SOME if few == SOME.rows else MORE
    if beyond and columns % BLOCK == depth % BLOCK == 0 and blocks_by_torch(device):
        return None
    if few == STREAMED[1] and _alone(rows, columns, BLOCKS_ALONE, device):
        return BLOCKS_ALONE
    return replace(BLOCKS if columns < WIDE and rows <= MOST_ROWS else BLOCKS_WIDE, rows=few)


def _on_gpu(weight: Scaled) -> bool:
    return weight.values.is_cuda


def _alone(rows: int, columns: int, tile: Tile, device: torch.device) -> bool:
    """Whether each program has a multiprocessor of its own."""
    return triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns) <= processors(device)


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
