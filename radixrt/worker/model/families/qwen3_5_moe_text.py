"""Qwen3.5 with experts, a shared one among them, in all layers."""

from typing import Any

from radixrt.worker.model.families import qwen3_next
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = qwen3_next.DEFAULTS | {"num_experts": 256, "num_experts_per_tok": 8}
FIXED = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
"""Whatever config.json says."""


def spec(config: dict[str, Any]) -> ModelSpec:
    """As Qwen3.5; weights of experts are always normalized."""
    config = DEFAULTS | config | FIXED
    config["intermediate_size"] = config["moe_intermediate_size"]  # no layer has an MLP of that size
    return qwen3_next.with_shared_expert(qwen3_next.hybrid(config), config)
