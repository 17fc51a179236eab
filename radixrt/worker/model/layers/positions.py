"""What depends on the positions of tokens alone."""

from __future__ import annotations

from typing import Any

import torch

from radixrt.worker.model.layers.mixers import LayerPlace
from radixrt.worker.model.layers.rope import frequencies
from radixrt.worker.model.spec.spec import ModelSpec


def place_of(spec: ModelSpec, layer: int) -> LayerPlace:
    """The place of a layer; one after all others has the RoPE of the last one."""
    recurrent = sorted(spec.recurrent.layers) if spec.recurrent else []
    others = spec.attention_layers if layer in spec.attention_layers else recurrent
    rope, scaling = spec.ropes[min(layer, len(spec.ropes) - 1)], spec.attention.query_scaling
    scales = scaling is not None and not (scaling.only_without_rope and rope)
    return LayerPlace(layer, others.index(layer) if layer in others else 0, _kinds(spec).index(rope), scales)


def _kinds(spec: ModelSpec) -> list[dict[str, Any] | None]:
    """The parameters of RoPE that layers have, each once."""
    return [rope for i, rope in enumerate(spec.ropes) if rope not in spec.ropes[:i]]


class Positions:
    """RoPE's cos and sin, and the scaling of queries. Layers with equal RoPE parameters share a kind."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        found = [frequencies(rope, spec.rope_dim, spec.max_model_len) for rope in _kinds(spec)]
        self._angles = [(angles.to(device), factor) for angles, factor in found]
        self._query_scaling = spec.attention.query_scaling

    def rotations(self, positions: torch.Tensor, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """By kind: cos and sin [T, 1, rope_dim / 2] for int positions[T]."""
        found = []
        for angles, factor in self._angles:
            angle = positions[:, None, None].float() * angles
            found.append(((angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)))
        return found

    def query_factors(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """Factors [T, 1, 1] of queries at int positions[T] (see `spec.QueryScaling`); None if there are none."""
        if self._query_scaling is None:
            return None
        beta, tokens, ahead = self._query_scaling.beta, self._query_scaling.tokens, self._query_scaling.ahead
        steps = (positions + ahead).float().div(tokens).floor()
        return (1 + beta * torch.log(1 + steps))[:, None, None].to(dtype)
