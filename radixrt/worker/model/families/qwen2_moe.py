"""Qwen1.5 and Qwen2 with experts, and with shared experts that have a gate."""

from typing import Any

from radixrt.worker.model.families import qwen2
from radixrt.worker.model.families.qwen3_moe import sparse_layers
from radixrt.worker.model.spec.expert_spec import ExpertsSpec
from radixrt.worker.model.spec.fields import with_experts
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = {"num_key_value_heads": 16, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}


def spec(config: dict[str, Any]) -> ModelSpec:
    """Without `layer_types`, layers 0, 2, 4, ... before `max_window_layers` have a window, if `use_sliding_window`. For
    the layers with experts see `qwen3_moe.sparse_layers`."""
    config = DEFAULTS | config
    if not config.get("layer_types"):
        first = config["max_window_layers"]
        kinds = [("sliding", "full")[i % 2 or i >= first] for i in range(config["num_hidden_layers"])]
        config["layer_types"] = [f"{kind}_attention" for kind in kinds]
    experts = ExpertsSpec(
        count=config.get("num_experts", 60),
        top_k=config.get("num_experts_per_tok", 4),
        intermediate_size=config.get("moe_intermediate_size", 1408),
        normalized=bool(config.get("norm_topk_prob", False)),
        layers=sparse_layers(config),
        shared_size=config.get("shared_expert_intermediate_size", 5632),
        shared="shared_expert",
        shared_gate="shared_expert_gate",
    )
    return with_experts(qwen2.spec(config, qkv_bias=bool(config.get("qkv_bias", True))), experts)
