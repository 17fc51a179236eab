"""LoRA adapters of a model: products to which each row's adapter adds its part, out += factor * B(A x).

    x[T, in] --- base weight ------------------------------> out[T, out]
             \\- A of the row's adapter -> [T, r] -> B ---/  +

Adapters are numbered. The matrices of all adapters are stacked, and padded with zeros to the same rank. Where several
projections are one product (q, k and v), so are their A; each row of B belongs to one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from radixrt.lora_modules import FLAG
from radixrt.worker.model.adapter import Adapter, Pair
from radixrt.worker.model.linear import Linear

if TYPE_CHECKING:
    from radixrt.worker.model.layers import Product
    from radixrt.worker.model.ops import Ops
    from radixrt.worker.model.tensors import Piece

RANK_ALIGNMENT = 16
"""Ranks are padded to a multiple of this: tensor cores multiply so many columns at once."""


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


@dataclass(frozen=True, slots=True)
class LoraLinear:
    """A product with adapters. As `linear.Linear`."""

    base: Product
    stack: Stack
    rows: Rows
    ops: Ops
    batch_invariant: bool

    rounding: ClassVar[None] = None
    """The input is not to be quantized: adapters multiply it as it is. An FP8 product quantizes it itself."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base(x)
        self._add(x, out)
        return out

    def put(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write the result to `out` [T, out]."""
        self.base.put(x, out)
        self._add(x, out)

    def add(self, x: torch.Tensor, residual: torch.Tensor, factor: float = 1.0) -> None:
        """Add the result times a factor to residual[T, out], in place."""
        self.base.add(x, residual, factor)
        self._add(x, residual, factor)

    def gated_linear(self, x: torch.Tensor, activation: str) -> torch.Tensor | None:
        """As `Linear.gated_linear`; None if a row has an adapter, whose part comes before the gate."""
        if self.rows.adapters is not None or not isinstance(self.base, Linear):
            return None
        return self.base.gated_linear(x, activation)

    def _add(self, x: torch.Tensor, out: torch.Tensor, factor: float = 1.0) -> None:
        if self.rows.adapters is not None:
            self.ops.lora(x, self.stack, self.rows, out, factor, self.batch_invariant)


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


class Adapters:
    """Adds adapters to the products of a model while it is read."""

    def __init__(self, adapters: Sequence[Adapter], ops: Ops, dtype: torch.dtype, batch_invariant: bool) -> None:
        self.rows = Rows()
        self._adapters = adapters
        self._ops = ops
        self._dtype = dtype
        self._batch_invariant = batch_invariant
        self._rank = _padded(max(adapter.rank for adapter in adapters))
        self._used: list[set[str]] = [set() for _ in adapters]

    def on(
        self,
        product: Product,
        pieces: Sequence[Piece],
        other_name: Callable[[str], str],
        order: Callable[[Piece, torch.Tensor], torch.Tensor],
    ) -> Product:
        """The product of `pieces`, with what adapters have for these; the product itself if they have nothing.
        `other_name`: the name that transformers may have for a piece; `order` reorders the rows of a piece, as
        `TensorReader._deinterleaved`. ValueError for matrices of wrong shapes."""
        names = [(piece.name, other_name(piece.name)) for piece in pieces]
        found = [[self._find(number, both) for both in names] for number in range(len(self._adapters))]
        if not any(pair for pairs in found for pair in pairs):
            return product
        sizes, columns = tuple(_rows_of(piece) for piece in pieces), _columns_of(pieces[0])
        kind = {"dtype": self._dtype, "device": _device_of(product)}
        a = torch.zeros((len(found), len(pieces) * self._rank, columns), **kind)
        b = torch.zeros((len(found), sum(sizes), self._rank), **kind)
        for number, pairs in enumerate(found):
            places = zip(pieces, pairs, a[number].split(self._rank), b[number].split(sizes), strict=True)
            for piece, pair, own_a, own_b in places:
                if pair is not None:
                    _check_shape(self._adapters[number].name, piece, pair)
                    own_a[: pair.rank] = _own(pair.a, piece, dim=1)
                    own_b[:, : pair.rank] = order(piece, _own(pair.b, piece, dim=0)).float() * pair.scale
        return LoraLinear(product, Stack(a, b, sizes), self.rows, self._ops, self._batch_invariant)

    def check_all_used(self) -> None:
        """Raise ValueError for an adapter with matrices of a projection that the model does not have, or that has no
        adapters here."""
        for adapter, used in zip(self._adapters, self._used, strict=True):
            if unused := sorted(adapter.pairs.keys() - used):
                more = f", and {len(unused) - 1} more" if len(unused) > 1 else ""
                raise ValueError(f"{FLAG} {adapter.name}: LoRA of {unused[0]}{more} is not served for this model")

    def _find(self, number: int, names: tuple[str, str]) -> Pair | None:
        pairs, used = self._adapters[number].pairs, self._used[number]
        for name in names:
            if (pair := pairs.get(name)) is not None:
                used.add(name)
                return pair
        return None


def _padded(rank: int) -> int:
    return math.ceil(rank / RANK_ALIGNMENT) * RANK_ALIGNMENT


def _rows_of(piece: Piece) -> int:
    if piece.order is not None:
        return len(piece.order)
    return piece.rows.count if piece.rows else piece.shape[0]


def _columns_of(piece: Piece) -> int:
    return piece.part.count if piece.part and piece.part.dim == 1 else piece.shape[1]


def _own(matrix: torch.Tensor, piece: Piece, dim: int) -> torch.Tensor:
    """This rank's part of A (`dim` 1) or B (`dim` 0), as it has of the base weight."""
    part = piece.part
    return matrix.narrow(part.dim, part.start, part.count) if part and part.dim == dim else matrix


def _check_shape(name: str, piece: Piece, pair: Pair) -> None:
    shape = len(pair.b), pair.a.shape[1]
    if shape != tuple(piece.shape):
        raise ValueError(
            f"{FLAG} {name}: {piece.name} is {list(piece.shape)} in the model, in the adapter {list(shape)}"
        )


def _device_of(product: Product) -> torch.device:
    weight = product.weight
    return (weight if isinstance(weight, torch.Tensor) else weight.values).device
