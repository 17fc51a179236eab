"""OLMoE: Llama with one norm over all heads of q, and of k, and with experts in all layers."""

from typing import Any

from radixrt.worker.model.families import llama
from radixrt.worker.model.spec.expert_spec import ExpertsSpec
from radixrt.worker.model.spec.fields import check_served, with_experts
from radixrt.worker.model.spec.spec import ModelSpec


def spec(config: dict[str, Any]) -> ModelSpec:
    """Clipped q, k and v (`clip_qkv`) are not served."""
    check_served(config, {"clip_qkv": None})
    config = {"rms_norm_eps": 1e-5} | config | {"mlp_bias": False}
    return with_experts(llama.spec(config, qk_norm_all_heads=True), experts_spec(config, count=64, top_k=8))


def experts_spec(config: dict[str, Any], count: int, top_k: int) -> ExpertsSpec:
    """Experts in all layers; `count` and `top_k` are the defaults."""
    return ExpertsSpec(
        count=config.get("num_experts") or config.get("num_local_experts") or count,
        top_k=config.get("num_experts_per_tok", top_k),
        intermediate_size=config["intermediate_size"],
        normalized=bool(config.get("norm_topk_prob", False)),
        layers=frozenset(range(config["num_hidden_layers"])),
    )
