"""ERNIE 4.5, dense: neighbours of a head are rotated together."""

from __future__ import annotations

from typing import Any

from radixrt.worker.model.spec import ModelSpec, common

DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 5e5}
DEFAULTS |= {"tie_word_embeddings": True}
"""Of transformers, in place of what a file leaves out."""


def spec(config: dict[str, Any]) -> ModelSpec:
    """All products have biases with `use_bias`, or none."""
    config = DEFAULTS | config
    bias = bool(config.get("use_bias"))
    return common(config, interleaved=True, qkv_bias=bias, output_bias=bias, mlp_bias=bias)
