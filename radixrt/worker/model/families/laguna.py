"""Poolside's Laguna: gated attention; layers with sliding windows have more query heads than others, and rotate more of
each; experts selected by sigmoid."""

from __future__ import annotations

import dataclasses
from typing import Any

from radixrt.worker.model.spec.expert_spec import ExpertsSpec, Routing
from radixrt.worker.model.spec.fields import (
    check_served,
    common,
    layer_windows,
    moe_layers,
    partial_rotary_dim,
    rope_parameters,
    ropes_by_kind,
    with_experts,
)
from radixrt.worker.model.spec.spec import GateSpec, ModelSpec

DEFAULTS = {"head_dim": 128, "num_key_value_heads": 8, "sliding_window": 512, "max_position_embeddings": 131_072}
DEFAULTS |= {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "gating": True}
DEFAULTS |= {"shared_expert_intermediate_size": 512, "moe_routed_scaling_factor": 1.0}
"""Defaults of transformers for fields that config.json lacks."""
ROPES = {"rope_theta": None, "rope_scaling": None, "partial_rotary_factor": None}
"""These fields of config.json are ignored: only `rope_parameters` counts."""
ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
SERVED = {"norm_topk_prob": True, "moe_apply_router_weight_on_input": False, "moe_router_logit_softcapping": 0.0}
"""The only values of these fields that are served: those of the published models."""
OTHER_NAMES = ((".mlp.shared_expert.", ".mlp.shared_experts."),)


def spec(config: dict[str, Any]) -> ModelSpec:
    """Without `layer_types`, all layers have full attention; without `mlp_layer_types`, all but the first have experts.
    `gating` says whether a gate is for a head or an element."""
    check_served(config, SERVED)
    config = DEFAULTS | config | ROPES
    layers, gating = config["num_hidden_layers"], config["gating"]
    if gating not in (True, "per-head", "per-element"):
        raise ValueError(f"gating {gating!r} is not served; true, 'per-head' and 'per-element' are")
    kinds = config.get("layer_types") or ["full_attention"] * layers
    heads = tuple(config.get("num_attention_heads_per_layer") or (config["num_attention_heads"],) * layers)
    config |= {"layer_types": kinds, "num_attention_heads": max(heads)}
    config["rope_parameters"] = config.get("rope_parameters") or ROPE
    by_kind, head_dim = ropes_by_kind(config), config["head_dim"]
    bias = bool(config.get("attention_bias"))
    plain = common(
        by_kind["full_attention"],
        windows=layer_windows(config),
        layer_ropes=tuple(_with_rotary_dim(rope_parameters(by_kind[kind]), head_dim) for kind in kinds),
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        gate=GateSpec("g_proj", per_head=gating != "per-element", softplus=True),
        other_names=OTHER_NAMES,
    )
    if len(heads) != layers or any(n % plain.num_kv_heads for n in heads):
        raise ValueError(f"num_attention_heads_per_layer {list(heads)} is not served; multiples of the KV heads are")
    if len(set(heads)) > 1:
        plain = dataclasses.replace(plain, layer_heads=heads)
    experts = ExpertsSpec(
        count=config["num_experts"],
        top_k=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"],
        normalized=True,
        layers=moe_layers(config, dense=1),
        prefix="mlp",
        names=("gate_proj", "up_proj", "down_proj"),
        bias=("experts.e_score_correction_bias", "gate.e_score_correction_bias"),
        routing=Routing(sigmoid=True, factor=config["moe_routed_scaling_factor"]),
        shared_size=config["shared_expert_intermediate_size"],
        shared="shared_expert",
    )
    return with_experts(plain, experts)


def _with_rotary_dim(rope: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Replace `partial_rotary_factor` by `rotated`, a number of elements, since layers differ in it."""
    rotary_dim = partial_rotary_dim({}, rope, head_dim)
    return rope | {"rotated": rotary_dim or head_dim}
