"""GLM-4.6V Flash: only its language model."""

from typing import Any

from radixrt.worker.model.families import glm4v, glm4v_moe
from radixrt.worker.model.spec.spec import ModelSpec

PARTS = {"glm4v_text": glm4v.spec, "glm4v_moe_text": glm4v_moe.spec}


def spec(config: dict[str, Any]) -> ModelSpec:
    """By the family that `text_config` names; ValueError if it is none of PARTS."""
    family = config["text_config"].get("model_type", "glm4v_text")
    if family not in PARTS:
        raise ValueError(f"text_config: model_type {family!r} is not served; {', '.join(PARTS)} are")
    return PARTS[family](config)
