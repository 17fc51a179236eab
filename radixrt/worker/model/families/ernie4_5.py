"""ERNIE 4.5, dense: interleaved RoPE."""

from typing import Any

from radixrt.worker.model.spec.fields import common
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 5e5}
DEFAULTS |= {"tie_word_embeddings": True}


def spec(config: dict[str, Any]) -> ModelSpec:
    """With `use_bias`, all projections have biases."""
    config = DEFAULTS | config
    bias = bool(config.get("use_bias"))
    return common(config, interleaved=True, qkv_bias=bias, output_bias=bias, mlp_bias=bias)
