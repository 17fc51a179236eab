"""GLM-4.7 Flash: DeepSeek V3 with other sizes."""

from typing import Any

from radixrt.worker.model.families import deepseek_v3
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS: dict[str, Any] = {"q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64}
DEFAULTS |= {"v_head_dim": 256, "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4}
DEFAULTS |= {"moe_intermediate_size": 1536, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
DEFAULTS |= {"routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5, "max_position_embeddings": 202_752}


def spec(config: dict[str, Any]) -> ModelSpec:
    """`mlp_layer_types` replaces `first_k_dense_replace`; ValueError if dense layers follow sparse ones."""
    config = DEFAULTS | config
    if kinds := config.get("mlp_layer_types"):
        first = kinds.count("dense")
        if kinds != ["dense"] * first + ["sparse"] * (len(kinds) - first):
            raise ValueError("mlp_layer_types: dense layers behind sparse ones are not served")
        config["first_k_dense_replace"] = first
    return deepseek_v3.spec(config)
