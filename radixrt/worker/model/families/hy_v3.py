"""Hunyuan 3: norms of q and k; experts selected by sigmoid in all layers but the first."""

from typing import Any

from radixrt.worker.model.families import llama
from radixrt.worker.model.spec.expert_spec import ExpertsSpec, Routing
from radixrt.worker.model.spec.fields import check_served, moe_layers, with_experts
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 11_158_840.0}
DEFAULTS |= {"num_experts": 192, "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 1536}
DEFAULTS |= {"first_k_dense_replace": 1, "router_scaling_factor": 2.826, "max_position_embeddings": 131_072}
SERVED = {"qk_norm": True, "route_norm": True, "moe_router_use_sigmoid": True, "moe_router_enable_expert_bias": True}
OTHER_NAMES = (
    (".mlp.router.gate.weight", ".mlp.gate.weight"),
    (".mlp.expert_bias", ".mlp.e_score_correction_bias"),
    (".mlp.shared_mlp.", ".mlp.shared_experts."),
)
"""Names in the published files, and those that transformers writes."""


def spec(config: dict[str, Any]) -> ModelSpec:
    """Without `mlp_layer_types`, all layers from `first_k_dense_replace` on have experts. Routers are computed in
    float32. Multi-token prediction layers are ignored."""
    check_served(config, SERVED)
    config = DEFAULTS | config
    inner = config["moe_intermediate_size"]
    experts = ExpertsSpec(
        count=config["num_experts"],
        top_k=config["num_experts_per_tok"],
        intermediate_size=inner,
        normalized=True,
        layers=moe_layers(config, dense=config["first_k_dense_replace"]),
        router="router.gate",
        bias=("expert_bias",),
        routing=Routing(sigmoid=True, factor=config["router_scaling_factor"], float32_logits=True, float32_weight=True),
        shared_size=inner * config["num_shared_experts"],
        shared="shared_mlp",
    )
    return with_experts(llama.spec(config, qk_norm=True, other_names=OTHER_NAMES), experts)
