"""Sarvam 105b: DeepSeek V3 with other sizes."""

from typing import Any

from radixrt.worker.model.families import deepseek_v3
from radixrt.worker.model.families.sarvam_moe import OLDER
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = {"n_routed_experts": 128, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}


def spec(config: dict[str, Any]) -> ModelSpec:
    """Fields have DeepSeek's names, or older ones of Sarvam's own; `deepseek_yarn` is `yarn`."""
    config = DEFAULTS | {OLDER.get(name, name): value for name, value in config.items()}
    rope = config.get("rope_scaling") or {}
    if "deepseek_yarn" in (rope.get("type"), rope.get("rope_type")):
        config["rope_scaling"] = rope | {"rope_type": "yarn"}
    return deepseek_v3.spec(config)
