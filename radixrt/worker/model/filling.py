"""Layers with fewer query heads than others, filled up: every layer has as many, and attention one shape.

    of each KV head's group   q_proj  rows of zeros behind its own      o_proj  columns of zeros

What a head of zeros gives is multiplied by zeros, so that the result is that of the others, and no more is read of K
and V. (Of Laguna's layers a quarter have 6 heads a KV head, the others 8 or 9.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from radixrt.worker.model.checkpoint import Renamed, Weights
from radixrt.worker.model.scaled import Scaled
from radixrt.worker.model.sharding import Part
from radixrt.worker.model.spec import ModelSpec


class Filled(Renamed):
    """Weights of a model whose layers have `ModelSpec.layer_heads`, as if all had `ModelSpec.num_heads`."""

    def __init__(self, weights: Weights, spec: ModelSpec) -> None:
        super().__init__(weights, spec.other_names)
        self._spec = spec
        rows = "q_proj" if spec.gate is None else f"(?:q_proj|{spec.gate.name})"
        self._of_heads = re.compile(rf"\.layers\.(\d+)\.self_attn\.(?:{rows}\.(?:weight|bias)|(o_proj)\.weight)$")

    def load(self, name: str, shape: Sequence[int], part: Part | None = None) -> torch.Tensor:
        if (found := self._fewer(name)) is None:
            return super().load(name, shape, part)
        heads, dim = found
        stored = list(shape)
        stored[dim] = shape[dim] // self._spec.num_heads * heads
        whole = self._fill(super().load(name, stored), heads, dim)
        return whole if part is None else whole.narrow(part.dim, part.start, part.count).contiguous()

    def scaled(self, name: str, shape: Sequence[int], part: Part | None = None) -> Scaled | None:
        """None of what is filled up: it is multiplied out."""
        return super().scaled(name, shape, part) if self._fewer(name) is None else None

    def _fewer(self, name: str) -> tuple[int, int] | None:
        """(heads, the dimension that they are in) of a tensor that lacks some."""
        match = self._of_heads.search(name)
        if match is None or (heads := self._spec.layer_heads[int(match[1])]) == self._spec.num_heads:
            return None
        return heads, 1 if match[2] else 0

    def _fill(self, own: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
        kv_heads, missing = self._spec.num_kv_heads, self._spec.num_heads - heads
        groups = own.unflatten(dim, (kv_heads, heads // kv_heads, -1))
        behind = groups.dim() - dim - 2  # dimensions after that of a group's heads
        return F.pad(groups, (0, 0) * behind + (0, missing // kv_heads)).flatten(dim, dim + 2)
