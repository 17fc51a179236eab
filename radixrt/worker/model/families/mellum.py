"""Mellum 2: Qwen3 with experts, and with sliding windows, whose layers have other RoPE parameters."""

from typing import Any

from radixrt.worker.model.spec.expert_spec import ExpertsSpec
from radixrt.worker.model.spec.fields import (
    common,
    layer_windows,
    moe_layers,
    rope_parameters,
    ropes_by_kind,
    with_experts,
)
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = {"head_dim": 128, "num_key_value_heads": 4, "sliding_window": 1024, "num_experts_per_tok": 8}
DEFAULTS |= {"moe_intermediate_size": 896, "norm_topk_prob": True, "max_position_embeddings": 131_072}
ROPES = {"rope_theta": 5e5, "rope_local_base_freq": 1e4, "rope_scaling": None}
"""These fields of config.json are ignored: only `rope_parameters` counts."""


def spec(config: dict[str, Any]) -> ModelSpec:
    """Without `layer_types`, all layers have full attention; without `mlp_layer_types`, all have experts."""
    config = DEFAULTS | config | ROPES
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    config |= {"layer_types": kinds}
    by_kind = ropes_by_kind(config)
    plain = common(
        by_kind["full_attention"],
        windows=layer_windows(config),
        layer_ropes=tuple(rope_parameters(by_kind[kind]) for kind in kinds),
        qk_norm=True,
        attention_bias=True,
    )
    experts = ExpertsSpec(
        count=config.get("num_experts") or config.get("num_local_experts") or 64,
        top_k=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"],
        normalized=bool(config["norm_topk_prob"]),
        layers=moe_layers(config, dense=0),
    )
    return with_experts(plain, experts)
