"""DeepSeek V3, V3.1 and R1: latent attention, and experts by sigmoid, with a bias that balanced their load."""

from __future__ import annotations

from typing import Any

from radixrt.worker.model.deepseek_v2 import DEFAULTS, latent_decoder, with_routed
from radixrt.worker.model.spec import ModelSpec, Routing, check_served

ROUTED = {"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "n_routed_experts": 256, "n_shared_experts": 1}
ROUTED |= {"moe_intermediate_size": 2048, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5}
ROUTED |= {"norm_topk_prob": True, "rope_interleave": True}
"""Of transformers, in place of what a file leaves out."""


def spec(config: dict[str, Any]) -> ModelSpec:
    """Layers that guess tokens further ahead (`num_nextn_predict_layers`) are left out."""
    config = DEFAULTS | ROUTED | config
    check_served(config, {"scoring_func": "sigmoid", "topk_method": "noaux_tc"})
    spec = latent_decoder(config, interleaved=bool(config["rope_interleave"]))
    return with_routed(spec, config, by_sigmoid(config), bool(config["norm_topk_prob"]))


def by_sigmoid(config: dict[str, Any], wide_weight: bool = False) -> Routing:
    """One group and the factor 1 where a file says nothing of them."""
    return Routing(
        sigmoid=True,
        groups=config.get("n_group") or 1,
        kept_groups=config.get("topk_group") or 1,
        factor=config.get("routed_scaling_factor", 1.0),
        wide=True,
        wide_weight=wide_weight,
    )
