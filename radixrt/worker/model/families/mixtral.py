"""Mixtral: Mistral with experts in every layer."""

from typing import Any

from radixrt.worker.model.families import mistral
from radixrt.worker.model.spec.expert_spec import ExpertsSpec
from radixrt.worker.model.spec.fields import with_experts
from radixrt.worker.model.spec.spec import ModelSpec


def spec(config: dict[str, Any]) -> ModelSpec:
    """Mistral with experts; `layer_types` is ignored."""
    config = {"sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 1e6} | config | {"layer_types": None}
    experts = ExpertsSpec(
        count=config.get("num_local_experts", 8),
        top_k=config.get("num_experts_per_tok", 2),
        intermediate_size=config["intermediate_size"],
        normalized=True,
        layers=frozenset(range(config["num_hidden_layers"])),
        prefix="block_sparse_moe",
        names=("w1", "w3", "w2"),
    )
    return with_experts(mistral.spec(config), experts)
