"""OLMo (of 2024), 1b and 7b: Llama with LayerNorms that have no parameters."""

from __future__ import annotations

from typing import Any

from radixrt.worker.model.spec.fields import common
from radixrt.worker.model.spec.spec import ModelSpec, NormsSpec

NORMS = NormsSpec(centered=True, weight=False)
DEFAULTS = {"max_position_embeddings": 2048}
"""Default of transformers for a field that config.json lacks."""


def spec(config: dict[str, Any]) -> ModelSpec:
    """Norms have the epsilon 1e-5, whatever config.json says. With `clip_qkv`, queries, keys and values are clamped."""
    bias = bool(config.get("attention_bias"))
    return common(
        DEFAULTS | config | {"rms_norm_eps": 1e-5},
        norms=NORMS,
        qkv_bias=bias,
        output_bias=bias,
        clip_qkv=config.get("clip_qkv"),
    )
