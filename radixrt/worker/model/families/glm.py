"""GLM-4 9b: interleaved RoPE of half of each head; gate and up are stored as one matrix."""

from typing import Any

from radixrt.worker.model.spec.fields import common
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = {"head_dim": 128, "num_key_value_heads": 2, "attention_bias": True, "partial_rotary_factor": 0.5}
DEFAULTS |= {"rms_norm_eps": 1.5625e-07, "max_position_embeddings": 131_072}


def spec(config: dict[str, Any], **features: Any) -> ModelSpec:
    """`attention_bias` is for q, k and v only, not for the output. `features`: other fields of ModelSpec, for derived
    families."""
    config = DEFAULTS | config
    bias = bool(config["attention_bias"])
    return common(config, partial_rotary=True, interleaved=True, fused_gate_up=True, qkv_bias=bias, **features)
