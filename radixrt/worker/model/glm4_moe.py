"""GLM-4.5, 4.5 Air, 4.6 and 4.7: a half of each head is rotated; experts as DeepSeek V3's."""

from __future__ import annotations

from typing import Any

from radixrt.worker.model.deepseek_v2 import with_routed
from radixrt.worker.model.deepseek_v3 import by_sigmoid
from radixrt.worker.model.spec import ModelSpec, common

DEFAULTS = {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "first_k_dense_replace": 1, "norm_topk_prob": True}
DEFAULTS |= {"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1408}
DEFAULTS |= {"num_key_value_heads": 8}
"""Of transformers, in place of what a file leaves out."""


def spec(config: dict[str, Any], **features: Any) -> ModelSpec:
    """Heads of q and k are normalized with `use_qk_norm`; q, k and v have a bias with `attention_bias`, the output has
    none. Layers that guess tokens further ahead (`num_nextn_predict_layers`) are left out. `features` are a
    successor's."""
    config = DEFAULTS | config
    plain = common(
        config,
        partial_rotary=True,
        qk_norm=bool(config.get("use_qk_norm")),
        qkv_bias=bool(config.get("attention_bias")),
        **features,
    )
    return with_routed(plain, config, by_sigmoid(config), bool(config["norm_topk_prob"]))
