"""GLM-4 9b: a half of each head is rotated, its neighbours together; gate and up are stored as one matrix."""

from __future__ import annotations

from typing import Any

from radixrt.worker.model.spec import ModelSpec, common

DEFAULTS = {"head_dim": 128, "num_key_value_heads": 2, "attention_bias": True, "partial_rotary_factor": 0.5}
DEFAULTS |= {"rms_norm_eps": 1.5625e-07, "max_position_embeddings": 131_072}
"""Of transformers, in place of what a file leaves out."""


def spec(config: dict[str, Any], **features: Any) -> ModelSpec:
    """q, k and v have a bias with `attention_bias`, the output has none; `features` are a successor's."""
    config = DEFAULTS | config
    bias = bool(config["attention_bias"])
    return common(config, partial_rotary=True, interleaved=True, fused_gate_up=True, qkv_bias=bias, **features)
