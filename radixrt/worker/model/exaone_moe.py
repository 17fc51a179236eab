"""K-EXAONE: attention as EXAONE 4's, norms before it, experts as DeepSeek V3's."""

from __future__ import annotations

from typing import Any

from radixrt.worker.model import exaone4
from radixrt.worker.model.deepseek_v2 import with_routed
from radixrt.worker.model.deepseek_v3 import by_sigmoid
from radixrt.worker.model.spec import ModelSpec, NormsSpec, check_served, sparse_by_kind

DEFAULTS = {"first_k_dense_replace": 1, "moe_intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8}
DEFAULTS |= {"num_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
"""Of transformers, in place of what a file leaves out."""
OTHER_NAMES = ((".gate.e_score_correction_bias", ".e_score_correction_bias"),)


def spec(config: dict[str, Any]) -> ModelSpec:
    """`mlp_layer_types` names the layers with experts, where it is there. A router is computed in float32. Layers that
    guess tokens further ahead are left out."""
    check_served(config, {"scoring_func": "sigmoid", "topk_method": "noaux_tc"})
    config = DEFAULTS | config
    config |= {"n_routed_experts": config["num_experts"], "n_shared_experts": config["num_shared_experts"]}
    plain = exaone4.spec(config, norms=NormsSpec(), other_names=OTHER_NAMES)
    layers = sparse_by_kind(config, dense=config["first_k_dense_replace"])
    return with_routed(plain, config, by_sigmoid(config, wide_weight=True), bool(config["norm_topk_prob"]), layers)
