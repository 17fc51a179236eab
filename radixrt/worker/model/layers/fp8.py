"""Weights in FP8 with scales, for FP8 products: half the bytes to read, and twice the FLOP rate of 16 bits.

Activations are quantized to FP8 as well, when they are computed: with a scale for each row (token), or for each BLOCK
values of a row if the weight has scales for blocks. A static activation scale of a checkpoint is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch.nn import functional as F

FP8 = torch.float8_e4m3fn
LIMIT = 448.0
"""The largest finite FP8 (E4M3) number."""
BLOCK = 128
"""Scales for blocks: BLOCK x BLOCK values of a weight, or BLOCK values of a row of activations, share a scale."""
ALIGNMENT = 16
"""torch's FP8 products need weights whose rows and columns are multiples of this."""
SCALE_ALIGNMENT = 4
"""cuBLASLt needs a multiple of this many block scales in a row."""
MAX_COLUMNS = 1 << 15
"""The most columns of a weight: a program of the quantizing kernels holds a whole row of activations."""


class Fp8Scaling(Enum):
    """Which values of a quantized matrix share a scale: those of a row, or of a block (see BLOCK)."""

    ROWS = "rows"
    BLOCKS = "blocks"


@dataclass(frozen=True, slots=True)
class Fp8Activations:
    """Quantized activations: FP8 `values` [T, K] and float32 `scales`, [T, 1] or [T, ceil(K / BLOCK)]."""

    values: torch.Tensor
    scales: torch.Tensor

    def __len__(self) -> int:
        return len(self.values)

    def dequantized(self) -> torch.Tensor:
        """float32[T, K]."""
        columns = self.values.shape[1]
        scales = self.scales if self.scales.shape[1] == 1 else _expand_scales(self.scales, 1, columns)
        return self.values.float() * scales


Activations = torch.Tensor | Fp8Activations
"""Rows of hidden states, quantized if their consumer wants it so (`fp8_scaling`)."""


def plain(x: Activations) -> torch.Tensor:
    """Activations that are not quantized, since their consumer's `fp8_scaling` is None."""
    assert isinstance(x, torch.Tensor)
    return x


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A quantized weight: FP8 `values` [N, K] and float32 `scales`: by row [N, 1], or by block [ceil(N / BLOCK), C],
    where C is ceil(K / BLOCK) padded to a multiple of SCALE_ALIGNMENT."""

    values: torch.Tensor
    scales: torch.Tensor
    fp8_scaling: Fp8Scaling

    @classmethod
    def by_rows(cls, values: torch.Tensor, scales: torch.Tensor) -> Fp8Weight:
        return cls(values, scales, Fp8Scaling.ROWS)

    @classmethod
    def by_blocks(cls, values: torch.Tensor, scales: torch.Tensor) -> Fp8Weight:
        """From scales [ceil(N / BLOCK), ceil(K / BLOCK)], which are padded."""
        return cls(values, F.pad(scales, (0, -scales.shape[1] % SCALE_ALIGNMENT), value=1.0), Fp8Scaling.BLOCKS)

    @classmethod
    def of(cls, weight: torch.Tensor) -> Fp8Weight:
        """Quantize a weight [N, K], with a scale for each row."""
        found = quantize_activations(weight, Fp8Scaling.ROWS)
        return cls.by_rows(found.values, found.scales)

    def picked(self, order: torch.Tensor) -> Fp8Weight | None:
        """The rows at int64 `order`, in this order; None if these are not whole blocks that share scales."""
        order = order.to(self.values.device)
        values = self.values.view(torch.uint8)[order].view(FP8)  # torch cannot index FP8
        if self.fp8_scaling is Fp8Scaling.ROWS:
            return Fp8Weight.by_rows(values, self.scales[order])
        if len(order) % BLOCK or len(self.values) % BLOCK:
            return None
        blocks = order.view(-1, BLOCK)
        first = blocks[:, :1]
        if (first % BLOCK).any() or not torch.equal(blocks, first + torch.arange(BLOCK, device=order.device)):
            return None
        return Fp8Weight(values, self.scales[first[:, 0] // BLOCK], self.fp8_scaling)

    def dequantized(self) -> torch.Tensor:
        """float32[N, K]."""
        if self.fp8_scaling is Fp8Scaling.ROWS:
            return self.values.float() * self.scales
        rows, columns = self.values.shape
        return self.values.float() * _expand_scales(_expand_scales(self.scales, 0, rows), 1, columns)


def _expand_scales(scales: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return scales.repeat_interleave(BLOCK, dim).narrow(dim, 0, size)


def quantize_activations(x: torch.Tensor, fp8_scaling: Fp8Scaling) -> Fp8Activations:
    """Quantize x[T, K]: the largest magnitude of each group that shares a scale becomes LIMIT. The reference of the
    GPU kernels."""
    rows, size = x.shape
    each = size if fp8_scaling is Fp8Scaling.ROWS else BLOCK
    wide = F.pad(x.float(), (0, -size % each)).view(rows, -1, each)
    largest = wide.abs().amax(-1, keepdim=True)
    scales = torch.where(largest > 0, largest / LIMIT, 1.0)
    values = (wide / scales).view(rows, -1)[:, :size].to(FP8)
    return Fp8Activations(values, scales.squeeze(-1))


def concatenate_fp8(parts: Sequence[Fp8Weight]) -> Fp8Weight | None:
    """One weight with the rows of all parts. None if the parts have different kinds of scales, if a part but the last
    ends within a block, or if FP8 products do not support the sizes."""
    columns = parts[0].values.shape[1]
    aligned = columns % ALIGNMENT == 0 and all(len(part.values) % ALIGNMENT == 0 for part in parts)
    if len({part.fp8_scaling for part in parts}) > 1 or not aligned or columns > MAX_COLUMNS:
        return None
    if parts[0].fp8_scaling is Fp8Scaling.BLOCKS and any(len(part.values) % BLOCK for part in parts[:-1]):
        return None
    if len(parts) == 1:
        return parts[0]
    # torch.cat does not support FP8.
    values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(FP8)
    return Fp8Weight(values, torch.cat([part.scales for part in parts]), parts[0].fp8_scaling)


class ScaledOps(Protocol):
    """The part of `ops.Ops` that products in FP8 need."""

    def scaled(
        self,
        x: Activations,
        weight: Fp8Weight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The product of x[T, K] and an FP8 weight [N, K] transposed, plus bias[N], in `dtype`; x is quantized first if
        it is not yet. If residual[T, N] is given, the result is added to it, in place."""


@dataclass(frozen=True, slots=True)
class Fp8Linear:
    """A product with an FP8 weight. As `linear.Linear`, but the input may be quantized already."""

    weight: Fp8Weight
    bias: torch.Tensor | None
    dtype: torch.dtype
    """Dtype of the result."""
    ops: ScaledOps

    @property
    def fp8_scaling(self) -> Fp8Scaling:
        """How the input is to be quantized."""
        return self.weight.fp8_scaling

    def __call__(self, x: Activations) -> torch.Tensor:
        return self.ops.scaled(x, self.weight, self.bias, self.dtype)

    def put(self, x: Activations, out: torch.Tensor) -> None:
        """Write the result to `out` [T, out]."""
        out.copy_(self(x))

    def add(self, x: Activations, residual: torch.Tensor, factor: float = 1.0) -> None:
        """Add the result times a factor to residual[T, out], in place."""
        if factor != 1:
            residual.add_(self(x), alpha=factor)
            return
        self.ops.scaled(x, self.weight, self.bias, self.dtype, residual)
