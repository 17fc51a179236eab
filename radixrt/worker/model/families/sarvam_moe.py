"""Sarvam 30b: GLM-4.5 with RoPE of whole heads."""

from typing import Any

from radixrt.worker.model.families import glm4_moe
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = {"head_dim": 64, "num_key_value_heads": 4, "rope_theta": 8e6, "rms_norm_eps": 1e-6, "use_qk_norm": True}
DEFAULTS |= {"partial_rotary_factor": 1.0, "moe_intermediate_size": 1024, "num_experts_per_tok": 6}
DEFAULTS |= {"routed_scaling_factor": 2.5}
OLDER = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
"""Fields of Sarvam's older files, and their current names."""
OTHER_NAMES = (
    ("embed_tokens", "word_embeddings"),
    (".self_attn.qkv_proj", ".attention.query_key_value"),
    (".self_attn.o_proj", ".attention.dense"),
    (".self_attn.q_norm", ".attention.query_layernorm"),
    (".self_attn.k_norm", ".attention.key_layernorm"),
    (".gate.e_score_correction_bias", ".gate.expert_bias"),
)


def spec(config: dict[str, Any]) -> ModelSpec:
    """Fields have GLM's names, or older ones of Sarvam's own."""
    names = OLDER | {"use_qkv_bias": "attention_bias"}
    config = {names.get(name, name): value for name, value in config.items()}
    return glm4_moe.spec(DEFAULTS | config, other_names=OTHER_NAMES)
