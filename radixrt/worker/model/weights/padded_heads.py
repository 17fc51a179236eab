"""Pads layers that have fewer query heads than others with heads of zeros, so that attention has the same shape in all
layers.

    in the group of query heads of each KV head:   q_proj  zero rows at the end   o_proj  zero columns at the end

The output of a padding head is multiplied by zeros, so the result does not change, and no more of K and V is read. (In
Laguna, a quarter of the layers have 6 query heads per KV head, the others 8 or 9.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from radixrt.worker.model.layers.fp8 import Fp8Weight
from radixrt.worker.model.layers.int4 import Int4
from radixrt.worker.model.parallel.sharding import Part
from radixrt.worker.model.spec.spec import ModelSpec
from radixrt.worker.model.weights.weights import Renamed, Weights


class PaddedHeads(Renamed):
    """Weights of a model with `ModelSpec.layer_heads`, padded to `ModelSpec.num_heads` in every layer."""

    def __init__(self, weights: Weights, spec: ModelSpec) -> None:
        super().__init__(weights, spec.other_names)
        self._spec = spec
        rows = "q_proj" if spec.gate is None else f"(?:q_proj|{spec.gate.name})"
        self._pattern = re.compile(rf"\.layers\.(\d+)\.self_attn\.(?:{rows}\.(?:weight|bias)|(o_proj)\.weight)$")

    def load(self, name: str, shape: Sequence[int], part: Part | None = None) -> torch.Tensor:
        if (found := self._short_of_heads(name)) is None:
            return super().load(name, shape, part)
        heads, dim = found
        stored = list(shape)
        stored[dim] = shape[dim] // self._spec.num_heads * heads
        whole = self._pad(super().load(name, stored), heads, dim)
        return whole if part is None else whole.narrow(part.dim, part.start, part.count).contiguous()

    def scaled(self, name: str, shape: Sequence[int], part: Part | None = None) -> Fp8Weight | None:
        """None if padded: such weights are dequantized."""
        return super().scaled(name, shape, part) if self._short_of_heads(name) is None else None

    def int4(self, name: str, shape: Sequence[int], part: Part | None = None) -> Int4 | None:
        """As `scaled`."""
        return super().int4(name, shape, part) if self._short_of_heads(name) is None else None

    def _short_of_heads(self, name: str) -> tuple[int, int] | None:
        """(its heads, their dimension) if the tensor has fewer heads than `num_heads`, else None."""
        match = self._pattern.search(name)
        if match is None or (heads := self._spec.layer_heads[int(match[1])]) == self._spec.num_heads:
            return None
        return heads, 1 if match[2] else 0

    def _pad(self, own: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
        kv_heads, missing = self._spec.num_kv_heads, self._spec.num_heads - heads
        groups = own.unflatten(dim, (kv_heads, heads // kv_heads, -1))
        behind = groups.dim() - dim - 2  # dimensions after that of a group's heads: F.pad counts from the last one
        return F.pad(groups, (0, 0) * behind + (0, missing // kv_heads)).flatten(dim, dim + 2)
