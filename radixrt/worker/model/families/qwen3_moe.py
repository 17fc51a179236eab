"""Qwen3 with experts."""

from typing import Any

from radixrt.worker.model.families import qwen3
from radixrt.worker.model.spec.expert_spec import ExpertsSpec
from radixrt.worker.model.spec.fields import with_experts
from radixrt.worker.model.spec.spec import ModelSpec


def spec(config: dict[str, Any]) -> ModelSpec:
    """As Qwen3, but a window is that of all layers."""
    config = {"head_dim": None, "num_key_value_heads": 4} | config | {"layer_types": None, "max_window_layers": 0}
    experts = ExpertsSpec(
        count=config.get("num_experts") or config.get("num_local_experts", 128),
        top_k=config.get("num_experts_per_tok", 8),
        intermediate_size=config.get("moe_intermediate_size", 768),
        normalized=bool(config.get("norm_topk_prob", False)),
        layers=sparse_layers(config),
    )
    return with_experts(qwen3.spec(config), experts)


def sparse_layers(config: dict[str, Any]) -> frozenset[int]:
    """Layers with experts: every `decoder_sparse_step`-th, except `mlp_only_layers`."""
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    return frozenset(i for i in range(config["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0)
