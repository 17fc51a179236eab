"""GLM-4.5, 4.5 Air, 4.6 and 4.7: RoPE of half of each head; experts as in DeepSeek V3."""

from typing import Any

from radixrt.worker.model.families.deepseek_v2 import with_routed_experts
from radixrt.worker.model.families.deepseek_v3 import sigmoid_routing
from radixrt.worker.model.spec.fields import common
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "first_k_dense_replace": 1, "norm_topk_prob": True}
DEFAULTS |= {"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1408}
DEFAULTS |= {"num_key_value_heads": 8}


def spec(config: dict[str, Any], **features: Any) -> ModelSpec:
    """`attention_bias` is for q, k and v only, not for the output. For multi-token prediction layers see `predictor`.
    `features`: other fields of ModelSpec, for derived families."""
    config = DEFAULTS | config
    plain = common(
        config,
        partial_rotary=True,
        qk_norm=bool(config.get("use_qk_norm")),
        qkv_bias=bool(config.get("attention_bias")),
        **features,
    )
    return with_routed_experts(plain, config, sigmoid_routing(config), bool(config["norm_topk_prob"]))
