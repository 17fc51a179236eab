"""LoRA adapters of a model: products to which each row's adapter adds its part, out += factor * B(A x).

    x[T, in] --- base weight ------------------------------> out[T, out]
             \\- A of the row's adapter -> [T, r] -> B ---/  +

Adapters are numbered. The matrices of all adapters are stacked, and padded with zeros to the same rank. Where several
projections are one product (q, k and v), so are their A; each row of B belongs to one of them. `lora_slots` makes and
fills the stacks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from radixrt.worker.model.layers.fp8 import Activations, plain
from radixrt.worker.model.layers.linear import Linear, Product


@dataclass(frozen=True, slots=True)
class Stack:
    """The matrices of all adapters for one product of P projections."""

    a: torch.Tensor
    """[adapters, P * rank, in]: A of the first projection, then that of the second, and so on."""
    b: torch.Tensor
    """[adapters, out, rank], multiplied by the adapter's scale."""
    sizes: tuple[int, ...]
    """By projection: rows of `b`, which are one after the other."""

    @property
    def rank(self) -> int:
        return self.b.shape[2]


class Rows:
    """Which adapter each row has, int32[T], -1: none. One object for all products of a model; what it holds is replaced
    for each forward pass. `adapters` None: no row has one."""

    def __init__(self) -> None:
        self.adapters: torch.Tensor | None = None
        self.kept: dict[int, Any] = {}
        """What kernels have derived from them."""

    def use(self, adapters: torch.Tensor | None) -> None:
        """Set the adapters of the next forward pass."""
        self.adapters, self.kept = adapters, {}

    def select(self, wanted: torch.Tensor) -> None:
        """Go on with the rows at int64 `wanted`."""
        if self.adapters is not None:
            self.use(self.adapters[wanted])


class LoraOps(Protocol):
    """The part of `ops.Ops` that products with adapters need."""

    def lora(
        self, x: torch.Tensor, stack: Stack, rows: Rows, out: torch.Tensor, factor: float, batch_invariant: bool
    ) -> None:
        """Add factor * B(A x) of each row's adapter to out[T, N], in place, for x[T, K]. `batch_invariant`: see
        `linear.Linear`."""


@dataclass(frozen=True, slots=True)
class LoraLinear:
    """A product with adapters. As `linear.Linear`."""

    base: Product
    stack: Stack
    rows: Rows
    ops: LoraOps
    batch_invariant: bool

    fp8_scaling: ClassVar[None] = None
    """The input is not to be quantized: adapters multiply it as it is. An FP8 product quantizes it itself."""

    def __call__(self, x: Activations) -> torch.Tensor:
        out = self.base(x)
        self._add(x, out)
        return out

    def put(self, x: Activations, out: torch.Tensor) -> None:
        """Write the result to `out` [T, out]."""
        self.base.put(x, out)
        self._add(x, out)

    def add(self, x: Activations, residual: torch.Tensor, factor: float = 1.0) -> None:
        """Add the result times a factor to residual[T, out], in place."""
        self.base.add(x, residual, factor)
        self._add(x, residual, factor)

    def gated_linear(self, x: torch.Tensor, activation: str) -> torch.Tensor | None:
        """As `Linear.gated_linear`; None if a row has an adapter, whose part comes before the gate."""
        if self.rows.adapters is not None or not isinstance(self.base, Linear):
            return None
        return self.base.gated_linear(x, activation)

    def _add(self, x: Activations, out: torch.Tensor, factor: float = 1.0) -> None:
        if self.rows.adapters is not None:
            self.ops.lora(plain(x), self.stack, self.rows, out, factor, self.batch_invariant)


def add_by_adapter(
    x: torch.Tensor, stack: Stack, rows: Rows, out: torch.Tensor, factor: float, batch_invariant: bool
) -> None:
    """The reference of `Ops.lora`: one adapter after the other."""
    assert rows.adapters is not None
    for adapter in rows.adapters.unique().tolist():
        if adapter < 0:
            continue
        chosen = torch.nonzero(rows.adapters == adapter).flatten()
        inner = Linear(stack.a[adapter], None, batch_invariant)(x[chosen])
        parts = zip(inner.split(stack.rank, dim=1), stack.b[adapter].split(stack.sizes), strict=True)
        delta = torch.cat([Linear(b, None, batch_invariant)(part) for part, b in parts], dim=1)
        out.index_add_(0, chosen, delta.to(out.dtype), alpha=factor)
