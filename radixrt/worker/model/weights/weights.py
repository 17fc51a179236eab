"""Where a model's tensors come from: the interface, and the same tensors under other names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from radixrt.worker.model.layers.fp8 import Fp8Weight
from radixrt.worker.model.layers.int4 import Int4
from radixrt.worker.model.layers.int_linear import IntWeight
from radixrt.worker.model.parallel.sharding import Part


class Weights(Protocol):
    """A source of tensors, by their names in transformers. They are in the dtype and on the device of the worker,
    unless stated otherwise."""

    def __contains__(self, name: str) -> bool:
        """Whether an optional tensor exists."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def packed(self) -> bool:
        """Whether experts that are stored in MXFP4 (`mxfp4.PackedStack`), and matrices in INT4 (`int4.Int4`), stay so;
        otherwise they are dequantized."""

    def load(self, name: str, shape: Sequence[int], part: Part | None = None) -> torch.Tensor:
        """A tensor of the given `shape`, dequantized, or a part of it."""

    def scaled(self, name: str, shape: Sequence[int], part: Part | None = None) -> Fp8Weight | None:
        """A matrix in FP8 with its scales, or a part of it; None if it is not to be used in FP8: then `load` it."""

    def int4(self, name: str, shape: Sequence[int], part: Part | None = None) -> Int4 | None:
        """A matrix in INT4, or a part of it; None if it is not to be used in INT4: then `load` it."""

    def integers(self, name: str, shape: Sequence[int], part: Part | None = None) -> IntWeight | None:
        """A matrix in integers for a CPU, or a part of it; None if it is not to be used so: then `load` it."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The stored shape of a tensor that exists."""

    def get(self, name: str) -> torch.Tensor | None:
        """A tensor in its stored shape and dtype; None if it does not exist."""

    def bytes(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """A uint8 tensor of the given `shape`."""


class Renamed:
    """Weights that may be stored under other names. `pairs`: (a part of a name, its replacement), which all apply if
    there is no tensor of the requested name."""

    def __init__(self, weights: Weights, pairs: Sequence[tuple[str, str]]) -> None:
        self._weights = weights
        self._pairs = pairs

    def _name(self, name: str) -> str:
        if name in self._weights:
            return name
        other = self.renamed(name)
        return other if other in self._weights else name

    def renamed(self, name: str) -> str:
        """The other name, whether or not there is such a tensor."""
        for part, stored in self._pairs:
            name = name.replace(part, stored)
        return name

    def __contains__(self, name: str) -> bool:
        return self._name(name) in self._weights

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.dtype

    @property
    def packed(self) -> bool:
        return self._weights.packed

    def load(self, name: str, shape: Sequence[int], part: Part | None = None) -> torch.Tensor:
        return self._weights.load(self._name(name), shape, part)

    def scaled(self, name: str, shape: Sequence[int], part: Part | None = None) -> Fp8Weight | None:
        return self._weights.scaled(self._name(name), shape, part)

    def int4(self, name: str, shape: Sequence[int], part: Part | None = None) -> Int4 | None:
        return self._weights.int4(self._name(name), shape, part)

    def integers(self, name: str, shape: Sequence[int], part: Part | None = None) -> IntWeight | None:
        return self._weights.integers(self._name(name), shape, part)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(self._name(name))

    def get(self, name: str) -> torch.Tensor | None:
        return self._weights.get(self._name(name))

    def bytes(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        return self._weights.bytes(self._name(name), shape)


def load_float32(weights: Weights, name: str, size: int) -> torch.Tensor:
    """A small parameter [size], of any stored shape, that keeps its precision if it is stored in float32."""
    stored = weights.get(name)
    if stored is None or stored.numel() != size:
        stored = weights.load(name, (size,))
    return stored.float().flatten()


def copied_part(whole: torch.Tensor, part: Part) -> torch.Tensor:
    """A copy of a part of a tensor, so that the whole can be freed."""
    return whole.narrow(part.dim, part.start, part.count).clone(memory_format=torch.contiguous_format)
