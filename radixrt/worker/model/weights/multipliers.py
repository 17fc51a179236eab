"""Factors of activations, multiplied into the weights that make these when a checkpoint is read (Falcon-H1: arXiv
2507.22448, section 3.2.3). In 16 bits this rounds each weight once, as the factor would round each activation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from radixrt.worker.model.layers.fp8 import Fp8Weight
from radixrt.worker.model.layers.int4 import Int4
from radixrt.worker.model.parallel.sharding import Part
from radixrt.worker.model.weights.weights import Renamed, Weights, copied_part

if TYPE_CHECKING:
    from radixrt.worker.model.spec.spec import ModelSpec

Multipliers = tuple[tuple[str, tuple[tuple[int, float], ...]], ...]
"""(end of a tensor's name, for consecutive rows: (their number, their factor))."""


class Multiplied(Renamed):
    """The weights of a model with `ModelSpec.multipliers`, in 16 or 32 bits."""

    def __init__(self, weights: Weights, spec: ModelSpec) -> None:
        super().__init__(weights, spec.other_names)
        self._multipliers = spec.multipliers

    def load(self, name: str, shape: Sequence[int], part: Part | None = None) -> torch.Tensor:
        rows = self._rows(name)
        if not rows:
            return super().load(name, shape, part)
        whole = super().load(name, shape)
        counts, factors = (torch.tensor(x, device=whole.device) for x in zip(*rows, strict=True))
        column = factors.float().repeat_interleave(counts).view(-1, *[1] * (whole.dim() - 1))
        whole = (whole.float() * column).to(whole.dtype)
        return whole if part is None else copied_part(whole, part)

    def scaled(self, name: str, shape: Sequence[int], part: Part | None = None) -> Fp8Weight | None:
        """None if multiplied: such weights are dequantized."""
        return None if self._rows(name) else super().scaled(name, shape, part)

    def int4(self, name: str, shape: Sequence[int], part: Part | None = None) -> Int4 | None:
        """As `scaled`."""
        return None if self._rows(name) else super().int4(name, shape, part)

    def _rows(self, name: str) -> tuple[tuple[int, float], ...]:
        return next((rows for end, rows in self._multipliers if name.endswith(end)), ())
