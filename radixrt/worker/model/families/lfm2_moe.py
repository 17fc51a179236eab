"""LFM2 with experts, selected by sigmoid with a bias, in all but the first layers."""

from typing import Any

from radixrt.worker.model.families import lfm2
from radixrt.worker.model.spec.expert_spec import ExpertsSpec, Routing
from radixrt.worker.model.spec.fields import with_experts
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS: dict[str, Any] = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792}
DEFAULTS |= {"num_dense_layers": 2, "use_expert_bias": True, "routed_scaling_factor": 1.0, "norm_topk_prob": True}


def spec(config: dict[str, Any]) -> ModelSpec:
    config = DEFAULTS | config
    experts = ExpertsSpec(
        count=config["num_experts"],
        top_k=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"],
        normalized=bool(config["norm_topk_prob"]),
        layers=frozenset(range(config["num_dense_layers"], config["num_hidden_layers"])),
        prefix="feed_forward",
        names=("w1", "w3", "w2"),
        bias=("expert_bias",),
        routing=Routing(sigmoid=True, unbiased=not config["use_expert_bias"], factor=config["routed_scaling_factor"]),
    )
    return with_experts(lfm2.with_convolutions(config), experts)
