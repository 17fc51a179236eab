"""Matrix products in FP8 (`layers.fp8`): y[T, N] = x[T, K] times weight[N, K] transposed, both with scales.

With few rows the time is that of reading the weight, for which there is a kernel here that reads at nearly the full
bandwidth. Many rows go to torch's products (cuBLASLt, CUTLASS), which support block scales on Hopper only.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import triton
from torch.nn import functional as F

from radixrt.worker.cuda.elementwise.launching import num_sms
from radixrt.worker.cuda.linear.gemm import STREAMED, Tile, multiply, of_hopper, streaming
from radixrt.worker.cuda.linear.quantize_activations import padded, quantize
from radixrt.worker.model.layers.fp8 import BLOCK, Fp8Activations, Fp8Scaling, Fp8Weight

MAX_ROWS, MIN_LARGE_ROWS = 64, 256
"""The most rows for which the kernel here is used: in general, and where each program has a multiprocessor of its own
(on a GPU, block scales that torch does not support are always computed here)."""
ALONE, TILE_32, TILE_64 = Tile(64, 32, 256, 4, 6), Tile(32, 64, 128, 4, 6), Tile(64, 64, 128, 4, 6)
"""Tiles for more than 16 rows with row scales: ALONE where each program has a multiprocessor of its own; otherwise
TILE_32 for up to 32 rows, and TILE_64 (bench/products.py)."""
LARGE_TILES = Tile(64, 64, 256, 4, 6), Tile(128, 64, 128, 4, 8)
"""Tiles for more than MAX_ROWS on Hopper: the first one that leaves each program a multiprocessor of its own."""
BLOCKS_ALONE, BLOCKS, BLOCKS_WIDE = Tile(64, 32, 128, 4, 3), Tile(16, 64, 128, 4, 3), Tile(16, 128, 128, 4, 4)
"""Tiles with block scales: for 17 to 32 rows where each program has a multiprocessor of its own; for weights of fewer
than WIDE rows; and for others. The number of rows of the latter two is chosen by the input's."""
WIDE = 16384


def product(
    x: Fp8Activations, weight: Fp8Weight, bias: torch.Tensor | None, out: torch.Tensor, tile: Tile, add: bool = False
) -> None:
    """Write the product plus bias[N] to out[T, N], or with `add` add it there. With block scales, `tile.depth` must be
    that of a block."""
    scales = x.scales, weight.scales
    multiply(x.values, weight.values, out, tile, bias=bias, add=add, scales=scales, fp8_scaling=weight.fp8_scaling)


def tile_for(rows: int, weight: Fp8Weight) -> Tile | None:
    """The tile of the kernel here for `rows` rows; None where torch's product is faster."""
    columns, depth = weight.values.shape
    device, few = weight.values.device, next((most for most in STREAMED if rows <= most), MAX_ROWS)
    beyond = rows > MAX_ROWS and _on_gpu(weight)
    if weight.fp8_scaling is Fp8Scaling.ROWS:
        if beyond:
            fitting = rows <= MIN_LARGE_ROWS and of_hopper(device)
            return next((tile for tile in LARGE_TILES if fitting and _alone(rows, columns, tile, device)), None)
        if few == STREAMED[0]:
            return streaming(few, columns, 1, device)
        return ALONE if _alone(rows, columns, ALONE, device) else TILE_32 if few == TILE_32.rows else TILE_64
    if beyond and columns % BLOCK == depth % BLOCK == 0 and blocks_by_torch(device):
        return None
    if few == STREAMED[1] and _alone(rows, columns, BLOCKS_ALONE, device):
        return BLOCKS_ALONE
    return replace(BLOCKS if columns < WIDE and rows <= MAX_ROWS else BLOCKS_WIDE, rows=few)


def _on_gpu(weight: Fp8Weight) -> bool:
    return weight.values.is_cuda


def _alone(rows: int, columns: int, tile: Tile, device: torch.device) -> bool:
    """Whether each program has a multiprocessor of its own."""
    return triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns) <= num_sms(device)


@functools.cache
def blocks_by_torch(device: torch.device) -> bool:
    """cuBLASLt has products with scales of blocks on Hopper alone, and from CUDA 12.9 on."""
    cuda = tuple(int(number) for number in (torch.version.cuda or "0").split(".")[:2])
    return cuda >= (12, 9) and torch.cuda.get_device_capability(device) == (9, 0)


def scaled(
    x: torch.Tensor | Fp8Activations,
    weight: Fp8Weight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `Ops.scaled`."""
    known = x if isinstance(x, Fp8Activations) else quantize(x, weight.fp8_scaling)
    tile = tile_for(len(known), weight)
    if tile is None:
        made = _by_torch(known, weight, bias, dtype)
        return made if residual is None else residual.add_(made)
    out = residual
    if out is None:
        out = torch.empty((len(known), len(weight.values)), dtype=dtype, device=known.values.device)
    if len(known):
        product(known, weight, bias, out, tile, add=residual is not None)
    return out


def _by_torch(x: Fp8Activations, weight: Fp8Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if weight.fp8_scaling is Fp8Scaling.ROWS:
        # Accumulate at the tensor cores' own precision: the error relative to float32 is the same to three digits.
        return torch._scaled_mm(
            x.values, weight.values.t(), x.scales, weight.scales.t(), bias=bias, out_dtype=dtype, use_fast_accum=True
        )
    kinds, whole = F.ScalingType, padded(x)
    out = F.scaled_mm(
        whole.values, weight.values.t(), whole.scales, kinds.BlockWise1x128, weight.scales.t(), kinds.BlockWise128x128,
        output_dtype=dtype,
    )[: len(x)]  # fmt: skip
    return out if bias is None else out.add_(bias)
