"""K-EXAONE: EXAONE 4 with norms before attention and MLP, and experts as in DeepSeek V3."""

from typing import Any

from radixrt.worker.model.families import exaone4
from radixrt.worker.model.families.deepseek_v2 import with_routed_experts
from radixrt.worker.model.families.deepseek_v3 import sigmoid_routing
from radixrt.worker.model.spec.fields import check_served, moe_layers
from radixrt.worker.model.spec.norms_spec import NormsSpec
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS: dict[str, Any] = {"first_k_dense_replace": 1, "moe_intermediate_size": 1024, "num_experts": 64}
DEFAULTS |= {"num_experts_per_tok": 8, "num_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
OTHER_NAMES = ((".gate.e_score_correction_bias", ".e_score_correction_bias"),)


def spec(config: dict[str, Any]) -> ModelSpec:
    """Without `mlp_layer_types`, all layers from `first_k_dense_replace` on have experts. Routers are computed in
    float32. Multi-token prediction layers are ignored."""
    check_served(config, {"scoring_func": "sigmoid", "topk_method": "noaux_tc"})
    config = DEFAULTS | config
    config |= {"n_routed_experts": config["num_experts"], "n_shared_experts": config["num_shared_experts"]}
    plain = exaone4.spec(config, norms=NormsSpec(), other_names=OTHER_NAMES)
    layers = moe_layers(config, dense=config["first_k_dense_replace"])
    return with_routed_experts(
        plain, config, sigmoid_routing(config, float32_weight=True), bool(config["norm_topk_prob"]), layers
    )
