"""Matrix products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch.nn import functional as F

from radixrt.worker.model.layers.fp8 import Activations, Fp8Scaling, plain

ROWS = 16
"""Rows of every product if results must not depend on the batch: how a product rounds depends on its shape."""


class Product(Protocol):
    """A matrix product with a weight of any form, for rows of hidden states."""

    @property
    def fp8_scaling(self) -> Fp8Scaling | None:
        """How the input is to be quantized; None: not at all."""

    def __call__(self, x: Activations) -> torch.Tensor:
        """[T, out] of x[T, in]."""

    def put(self, x: Activations, out: torch.Tensor) -> None:
        """Write the result to `out` [T, out]."""

    def add(self, x: Activations, residual: torch.Tensor, factor: float = 1.0) -> None:
        """Add the result times a factor to residual[T, out], in place."""


class LinearOps(Protocol):
    """The part of `ops.Ops` that `Linear` needs."""

    def small_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor | None = None,
        add: bool = False,
    ) -> torch.Tensor | None:
        """The product of few rows x[T, K] and weight[N, K] transposed, plus bias[N]: a new tensor, or written to
        out[T, N], or added to it with `add`. None, and nothing is done, if torch's product is to be used."""

    def gated_linear(self, x: torch.Tensor, weight: torch.Tensor, activation: str) -> torch.Tensor | None:
        """`gate` of the product of many rows x[T, K] and weight[2 I, K] transposed, by one kernel: [T, I]. None, and
        nothing is done, if two kernels are faster."""


@dataclass(frozen=True, slots=True)
class Linear:
    """x[T, in] times weight[out, in] transposed, plus bias[out].

    `batch_invariant`: a row's result does not depend on the other rows, to the last bit. `ops`: kernels for few rows
    and for gates; None: only torch's product is used."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    batch_invariant: bool = False
    ops: LinearOps | None = None

    fp8_scaling: ClassVar[None] = None
    """The input is not to be quantized (see `fp8.Fp8Linear`)."""

    def __call__(self, x: Activations) -> torch.Tensor:
        x = plain(x)
        if not self.batch_invariant:
            few = self._small_linear(x)
            return F.linear(x, self.weight, self.bias) if few is None else few
        if x.is_cuda and x.dtype.itemsize == 2:
            from radixrt.worker.cuda.linear.invariant import product

            return product(x, self.weight, self.bias)
        tiles = F.pad(x, (0, 0, 0, -len(x) % ROWS)).split(ROWS)
        return torch.cat([F.linear(tile, self.weight, self.bias) for tile in tiles])[: len(x)]

    def put(self, x: Activations, out: torch.Tensor) -> None:
        """Write the result to `out` [T, out]."""
        x = plain(x)
        if self._small_linear(x, out) is not None:
            return
        if self.batch_invariant or self.bias is not None:
            out.copy_(self(x))
        else:
            torch.mm(x, self.weight.t(), out=out)

    def add(self, x: Activations, residual: torch.Tensor, factor: float = 1.0) -> None:
        """Add the result times a factor to residual[T, out], in place. Where possible, the product itself adds, so that
        the sum is rounded only once."""
        x = plain(x)
        if factor == 1 and self._small_linear(x, residual, add=True) is not None:
            return
        if self.batch_invariant or self.bias is not None:
            residual.add_(self(x), alpha=factor)
        else:
            residual.addmm_(x, self.weight.t(), alpha=factor)

    def gated_linear(self, x: torch.Tensor, activation: str) -> torch.Tensor | None:
        """`Ops.gate` of the result, by one kernel; None, and nothing is done, if two kernels are faster."""
        if self.batch_invariant or self.ops is None or self.bias is not None:
            return None
        return self.ops.gated_linear(x, self.weight, activation)

    def _small_linear(self, x: torch.Tensor, out: torch.Tensor | None = None, add: bool = False) -> torch.Tensor | None:
        """See `Ops.small_linear`."""
        if self.batch_invariant or self.ops is None:
            return None
        return self.ops.small_linear(x, self.weight, self.bias, out, add)


@dataclass(frozen=True, slots=True)
class HeadLinear:
    """A product for each head with a weight of its own: `weight` [heads, N, K], of any strides. `batch_invariant`: see
    Linear."""

    weight: torch.Tensor
    batch_invariant: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, heads, N] of x[T, heads, K]."""
        out = x.new_empty((*x.shape[:2], self.weight.shape[1]))
        self.put(x, out)
        return out

    def put(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write the result to `out` [T, heads, N]; x and `out` may have any strides between heads and tokens."""
        transposed = self.weight.transpose(1, 2)
        if not self.batch_invariant:
            torch.bmm(x.transpose(0, 1), transposed, out=out.transpose(0, 1))
        elif x.is_cuda and x.dtype.itemsize == 2:
            from radixrt.worker.cuda.linear.invariant import head_product

            head_product(x, self.weight, out)
        else:
            tiles = F.pad(x, (0, 0, 0, 0, 0, -len(x) % ROWS)).unflatten(0, (-1, ROWS))
            for tile, part in zip(tiles, out.split(ROWS), strict=True):
                part.copy_(torch.bmm(tile.transpose(0, 1).contiguous(), transposed).transpose(0, 1)[: len(part)])


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows of weight[vocab, hidden]."""

    weight: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """[T, hidden] of int tokens[T]."""
        return F.embedding(tokens, self.weight)


def concatenate(parts: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """torch.cat that clears the list `parts`, so that they are freed before the next matrix is loaded."""
    if len(parts) == 1:
        return parts[0]
    joined = torch.cat(parts, dim)
    parts.clear()
    return joined
