"""MiniMax M2 and its successors: one norm over all heads of q, and of k; RoPE of a part of each head; experts selected
by sigmoid in all layers."""

from typing import Any

from radixrt.worker.model.spec.expert_spec import ExpertsSpec, Routing
from radixrt.worker.model.spec.fields import check_served, common, with_experts
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = {"rope_theta": 5e6, "head_dim": 128, "num_key_value_heads": 8, "use_qk_norm": True}
SERVED = {
    "scoring_func": "sigmoid",
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
    "shared_intermediate_size": 0,
}


def spec(config: dict[str, Any]) -> ModelSpec:
    """RoPE rotates `rotary_dim` elements of a head. Multi-token prediction layers are ignored."""
    config = DEFAULTS | config
    check_served(config, SERVED)
    if config.get("rotary_dim"):
        config.setdefault("partial_rotary_factor", config["rotary_dim"] / config["head_dim"])
    layers = config["num_hidden_layers"]
    if set(config.get("attn_type_list") or [1]) != {1}:
        raise ValueError("attn_type_list: linear attention is not served")
    experts = ExpertsSpec(
        count=config.get("num_local_experts", 256),
        top_k=config.get("num_experts_per_tok", 8),
        intermediate_size=config["intermediate_size"],
        normalized=True,
        layers=frozenset(range(layers)),
        prefix="block_sparse_moe",
        names=("w1", "w3", "w2"),
        bias=("e_score_correction_bias",),
        routing=Routing(sigmoid=True, float32_logits=True),
    )
    return with_experts(common(config, partial_rotary=True, qk_norm_all_heads=bool(config["use_qk_norm"])), experts)
