"""OLMoE: q and k are normalized as a whole, and all layers have experts."""

from __future__ import annotations

from typing import Any

from radixrt.worker.model import llama
from radixrt.worker.model.spec import ExpertsSpec, ModelSpec, check_served, with_experts


def spec(config: dict[str, Any]) -> ModelSpec:
    """What is clipped (`clip_qkv`) is not served."""
    check_served(config, {"clip_qkv": None})
    config = {"rms_norm_eps": 1e-5} | config | {"mlp_bias": False}
    return with_experts(llama.spec(config, qk_norm_whole=True), all_experts(config, count=64, chosen=8))


def all_experts(config: dict[str, Any], count: int, chosen: int) -> ExpertsSpec:
    """Of all layers; so many where a file does not say how many."""
    return ExpertsSpec(
        count=config.get("num_experts") or config.get("num_local_experts") or count,
        chosen=config.get("num_experts_per_tok", chosen),
        intermediate_size=config["intermediate_size"],
        normalized=bool(config.get("norm_topk_prob", False)),
        layers=frozenset(range(config["num_hidden_layers"])),
        prefix="mlp",
        names=("gate_proj", "up_proj", "down_proj"),
    )
