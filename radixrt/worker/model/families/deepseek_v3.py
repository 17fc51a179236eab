"""DeepSeek V3, V3.1 and R1: latent attention, experts selected by sigmoid with a load-balancing bias."""

from typing import Any

from radixrt.worker.model.families.deepseek_v2 import DEFAULTS, latent_decoder, with_routed_experts
from radixrt.worker.model.spec.expert_spec import Routing
from radixrt.worker.model.spec.fields import check_served
from radixrt.worker.model.spec.spec import ModelSpec

ROUTED: dict[str, Any] = {"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "n_routed_experts": 256}
ROUTED |= {"n_shared_experts": 1, "moe_intermediate_size": 2048, "first_k_dense_replace": 3}
ROUTED |= {"routed_scaling_factor": 2.5, "norm_topk_prob": True, "rope_interleave": True}


def spec(config: dict[str, Any]) -> ModelSpec:
    """For multi-token prediction layers see `predictor`."""
    config = DEFAULTS | ROUTED | config
    check_served(config, {"scoring_func": "sigmoid", "topk_method": "noaux_tc"})
    spec = latent_decoder(config, interleaved=bool(config["rope_interleave"]))
    return with_routed_experts(spec, config, sigmoid_routing(config), bool(config["norm_topk_prob"]))


def sigmoid_routing(config: dict[str, Any], float32_weight: bool = False) -> Routing:
    """Routing of DeepSeek V3. Defaults are one group and a factor of 1."""
    return Routing(
        sigmoid=True,
        groups=config.get("n_group") or 1,
        kept_groups=config.get("topk_group") or 1,
        factor=config.get("routed_scaling_factor", 1.0),
        float32_logits=True,
        float32_weight=float32_weight,
    )
