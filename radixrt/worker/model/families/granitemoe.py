"""Granite 3 with experts in every layer, fused in one tensor."""

from typing import Any

from radixrt.worker.model.families import granite
from radixrt.worker.model.spec.expert_spec import ExpertsSpec
from radixrt.worker.model.spec.fields import with_experts
from radixrt.worker.model.spec.spec import ModelSpec

AT = "block_sparse_moe."
FUSED_NAMES = (
    (f"{AT}router.layer.weight", f"{AT}input_linear.weight", f"{AT}output_linear.weight"),
    (f"{AT}router.weight", f"{AT}experts.gate_up_proj", f"{AT}experts.down_proj"),
)


def spec(config: dict[str, Any]) -> ModelSpec:
    """Granite with experts."""
    return with_experts(granite.spec(config | {"mlp_bias": False}), experts_spec(config))


def experts_spec(config: dict[str, Any]) -> ExpertsSpec:
    """Experts in all layers."""
    return ExpertsSpec(
        count=config.get("num_local_experts", 8),
        top_k=config.get("num_experts_per_tok", 2),
        intermediate_size=config["intermediate_size"],
        normalized=True,
        layers=frozenset(range(config["num_hidden_layers"])),
        prefix="block_sparse_moe",
        names=("w1", "w3", "w2"),
        fused_names=FUSED_NAMES,
    )
