"""Granite 3 with experts, and a shared expert."""

import dataclasses
from typing import Any

from radixrt.worker.model.families import granite, granitemoe
from radixrt.worker.model.spec.fields import with_experts
from radixrt.worker.model.spec.spec import ModelSpec, with_features

OTHER_NAMES = (
    (".mlp.shared_experts.gate_up_proj", ".shared_mlp.input_linear"),
    (".mlp.shared_experts.down_proj", ".shared_mlp.output_linear"),
)


def spec(config: dict[str, Any]) -> ModelSpec:
    """Granite with experts and a shared one."""
    return with_shared(granite.spec(config | {"mlp_bias": False}), config)


def with_shared(plain: ModelSpec, config: dict[str, Any]) -> ModelSpec:
    """The spec `plain` with experts, and with a shared expert of `shared_intermediate_size`, if that is not 0."""
    experts = granitemoe.experts_spec(config)
    experts = dataclasses.replace(experts, shared_size=config.get("shared_intermediate_size") or 0)
    return with_experts(with_features(plain, fused_gate_up=True, other_names=OTHER_NAMES), experts)
