"""The slots of LoRA adapters: stacks of all products that adapters add to, and what is written into them.

The stacks are allocated while the model is read. Either they hold the adapters that are known then, and only products
that these add to have one; or adapters come and go (`Room`): then every product has one, with as many slots and as high
a rank as is said in advance. A slot is overwritten in place, so that CUDA graphs that read it stay valid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from radixrt.checkpoint.lora_modules import FLAG
from radixrt.worker.model.layers.fp8 import Fp8Linear
from radixrt.worker.model.layers.int4 import Int4Linear
from radixrt.worker.model.layers.int_linear import IntLinear
from radixrt.worker.model.layers.linear import Linear, Product
from radixrt.worker.model.lora.adapter import Adapter, Pair
from radixrt.worker.model.lora.lora import LoraLinear, LoraOps, Rows, Stack
from radixrt.worker.model.parallel.sharding import Part

BaseProduct = Linear | Fp8Linear | Int4Linear | IntLinear
"""A product without adapters."""
RANK_ALIGNMENT = 16
"""Ranks are padded to a multiple of this: tensor cores multiply so many columns at once."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A projection [out, in] of a checkpoint, and the part of it to read (None: all)."""

    name: str
    shape: tuple[int, int]
    part: Part | None = None
    has_bias: bool = True
    """Whether it has a bias, if those that it is concatenated with have one."""
    rotated: bool = False
    """It projects to q or k, which RoPE rotates."""
    order: torch.Tensor | None = None
    """int64: the rows of `part` that are used, in order; None: all."""

    @property
    def rows(self) -> Part | None:
        """The part of its bias."""
        return self.part if self.part and self.part.dim == 0 else None


class Room(NamedTuple):
    """Space for adapters that are loaded later."""

    slots: int
    max_rank: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where the matrices of one projection go: views of a Stack."""

    names: tuple[str, str]
    """Its name, and the one that transformers may have for it."""
    shape: tuple[int, int]
    """Rows and columns of the whole projection, of all ranks."""
    part: Part | None
    """This rank's part of it."""
    order: torch.Tensor | None
    """int64: which of the part's rows are used, in order; None: all, as they are."""
    a: torch.Tensor
    """[slots, rank, in]"""
    b: torch.Tensor
    """[slots, out, rank]"""

    def find(self, adapter: Adapter) -> tuple[str, Pair] | None:
        """The adapter's matrices for it, with the name that the adapter has for it."""
        return next(((name, adapter.pairs[name]) for name in self.names if name in adapter.pairs), None)

    def check(self, adapter: Adapter, pair: Pair) -> None:
        """Raise ValueError if matrices do not have the projection's shape."""
        shape = len(pair.b), pair.a.shape[1]
        if shape != tuple(self.shape):
            raise ValueError(
                f"{FLAG} {adapter.name}: {self.names[0]} is {list(self.shape)} in the model, in the adapter "
                f"{list(shape)}"
            )

    def write(self, slot: int, pair: Pair | None) -> None:
        """Overwrite a slot, with zeros where there are no matrices."""
        a, b = self.a[slot].zero_(), self.b[slot].zero_()
        if pair is not None:
            a[: pair.rank] = self._own(pair.a, dim=1)
            own = self._own(pair.b, dim=0)
            b[:, : pair.rank] = (own if self.order is None else own[self.order]).float() * pair.scale

    def _own(self, matrix: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of A (`dim` 1) or B (`dim` 0), as it has of the base weight."""
        part = self.part
        return matrix.narrow(part.dim, part.start, part.count) if part and part.dim == dim else matrix


class Adapters:
    """Adds `adapters` to the products of a model while it is read; they are in slots 0, 1, ... With `room`, others can
    be put into any slot later."""

    def __init__(
        self, adapters: Sequence[Adapter], room: Room | None, ops: LoraOps, dtype: torch.dtype, batch_invariant: bool
    ) -> None:
        self.rows = Rows()
        self.max_rank = room.max_rank if room else max(adapter.rank for adapter in adapters)
        self._slots = room.slots if room else len(adapters)
        self._everywhere = room is not None
        self._adapters = adapters
        self._ops = ops
        self._dtype = dtype
        self._batch_invariant = batch_invariant
        self._rank = _padded(self.max_rank)
        self._places: list[Place] = []

    def on(
        self,
        product: BaseProduct,
        pieces: Sequence[Piece],
        other_name: Callable[[str], str],
        order: Callable[[Piece, torch.Tensor], torch.Tensor],
    ) -> Product:
        """The product of `pieces`, with slots for what adapters have for these; the product itself if none has, or can
        get, anything. `other_name`: the name that transformers may have for a piece; `order` reorders the rows of a
        piece, as `TensorLoader._deinterleaved`."""
        names = [(piece.name, other_name(piece.name)) for piece in pieces]
        known = {name for adapter in self._adapters for name in adapter.pairs}
        if not self._everywhere and known.isdisjoint(name for both in names for name in both):
            return product
        sizes, columns = tuple(_rows_of(piece) for piece in pieces), _columns_of(pieces[0])
        device = _device_of(product)
        a = torch.zeros((self._slots, len(pieces) * self._rank, columns), dtype=self._dtype, device=device)
        b = torch.zeros((self._slots, sum(sizes), self._rank), dtype=self._dtype, device=device)
        for piece, both, own_a, own_b in zip(
            pieces, names, a.split(self._rank, dim=1), b.split(sizes, dim=1), strict=True
        ):
            self._places.append(Place(both, piece.shape, piece.part, _order_of(piece, order), own_a, own_b))
        return LoraLinear(product, Stack(a, b, sizes), self.rows, self._ops, self._batch_invariant)

    def fill(self) -> None:
        """Put the first adapters into their slots, once all products are read. ValueError as `put`."""
        for slot, adapter in enumerate(self._adapters):
            self.put(slot, adapter)
        self._adapters = ()

    @torch.inference_mode()
    def put(self, slot: int, adapter: Adapter) -> None:
        """Overwrite a slot that no step in flight uses. Raises ValueError, and leaves the slot as it is, for an adapter
        with a higher rank than there is room for, with matrices of wrong shapes, or of a projection that the model does
        not have, or that has no adapters here."""
        if adapter.rank > self.max_rank:
            raise ValueError(f"{FLAG} {adapter.name}: its rank is {adapter.rank}, there is room for {self.max_rank}")
        used, pairs = set(), []
        for place in self._places:
            name, pair = place.find(adapter) or ("", None)
            if pair is not None:
                place.check(adapter, pair)
                used.add(name)
            pairs.append(pair)
        if unused := sorted(adapter.pairs.keys() - used):
            more = f", and {len(unused) - 1} more" if len(unused) > 1 else ""
            raise ValueError(f"{FLAG} {adapter.name}: LoRA of {unused[0]}{more} is not served for this model")
        for place, pair in zip(self._places, pairs, strict=True):
            place.write(slot, pair)


def _padded(rank: int) -> int:
    return math.ceil(rank / RANK_ALIGNMENT) * RANK_ALIGNMENT


def _order_of(piece: Piece, order: Callable[[Piece, torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
    """The rows of this rank's part of a piece in the order in which they are used, int64; None: as they are."""
    numbers = torch.arange(piece.rows.count if piece.rows else piece.shape[0])
    ordered = order(piece, numbers)
    return None if torch.equal(ordered, numbers) else ordered


def _rows_of(piece: Piece) -> int:
    if piece.order is not None:
        return len(piece.order)
    return piece.rows.count if piece.rows else piece.shape[0]


def _columns_of(piece: Piece) -> int:
    return piece.part.count if piece.part and piece.part.dim == 1 else piece.shape[1]


def _device_of(product: BaseProduct) -> torch.device:
    weight = product.weight
    return (weight if isinstance(weight, torch.Tensor) else weight.values).device
