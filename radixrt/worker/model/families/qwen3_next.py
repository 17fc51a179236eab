"""Qwen3-Next: three of four layers have linear attention; gated attention, experts with a shared one."""

import dataclasses
from typing import Any

from radixrt.worker.model.families.qwen3_moe import sparse_layers
from radixrt.worker.model.spec.delta_spec import DeltaSpec
from radixrt.worker.model.spec.expert_spec import ExpertsSpec
from radixrt.worker.model.spec.fields import check_served, common, with_experts
from radixrt.worker.model.spec.norms_spec import NormsSpec
from radixrt.worker.model.spec.spec import GateSpec, ModelSpec

DEFAULTS = {"head_dim": 256, "num_key_value_heads": 2, "partial_rotary_factor": 0.25, "full_attention_interval": 4}
DEFAULTS |= {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
DEFAULTS |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "num_experts": 512, "num_experts_per_tok": 10}
DEFAULTS |= {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
SERVED = {"attention_bias": False, "attn_output_gate": True, "hidden_act": "silu"}
LINEAR, FULL = "linear_attention", "full_attention"


def spec(config: dict[str, Any]) -> ModelSpec:
    """For the layers with experts see `qwen3_moe.sparse_layers`; `num_experts` 0: there are none."""
    config = DEFAULTS | config
    plain = hybrid(config, fused=True)
    return with_shared_expert(plain, config) if config["num_experts"] else plain


def hybrid(config: dict[str, Any], fused: bool = False) -> ModelSpec:
    """The model without experts. Without `layer_types`, every `full_attention_interval`-th layer has attention."""
    check_served(config, SERVED)
    layers, every = range(config["num_hidden_layers"]), config["full_attention_interval"]
    kinds = config.get("layer_types") or [FULL if (i + 1) % every == 0 else LINEAR for i in layers]
    check_kinds(kinds, len(layers))
    plain = common(
        config,
        partial_rotary=True,
        qk_norm=True,
        norms=NormsSpec(float32_weight=True, offset=1.0),
        gate=GateSpec("q_proj", in_q=True),
    )
    return dataclasses.replace(plain, recurrent=delta(config, kinds, fused=fused))


def check_kinds(kinds: list[str], layers: int) -> None:
    """ValueError if `layer_types` has other kinds than are served, or not one for each layer."""
    if others := sorted(set(kinds) - {LINEAR, FULL}):
        raise ValueError(f"layer_types {', '.join(others)} are not served; {LINEAR} and {FULL} are")
    if FULL not in kinds:
        raise ValueError(f"layer_types: none is {FULL}")
    if len(kinds) != layers:
        raise ValueError(f"layer_types has {len(kinds)} layers, num_hidden_layers is {layers}")


def delta(config: dict[str, Any], kinds: list[str], **features: Any) -> DeltaSpec | None:
    """The linear attention of the layers of kind LINEAR; None if there are none. `features`: other fields of
    DeltaSpec."""
    delta_spec = DeltaSpec(
        layers=frozenset(i for i, kind in enumerate(kinds) if kind == LINEAR),
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        kernel=config["linear_conv_kernel_dim"],
        **features,
    )
    if delta_spec.value_heads % delta_spec.key_heads:
        raise ValueError(
            f"linear_num_key_heads {delta_spec.key_heads} does not divide {delta_spec.value_heads} heads of v"
        )
    return delta_spec if delta_spec.layers else None


def with_shared_expert(plain: ModelSpec, config: dict[str, Any]) -> ModelSpec:
    """The same model with experts, of which one is shared and has a gate."""
    experts = ExpertsSpec(
        count=config["num_experts"],
        top_k=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"],
        normalized=bool(config.get("norm_topk_prob", True)),
        layers=sparse_layers(config),
        shared_size=config["shared_expert_intermediate_size"],
        shared="shared_expert",
        shared_gate="shared_expert_gate",
    )
    return with_experts(plain, experts)
