"""Mistral Small 3.1, 3.2 and 4, Ministral 3 and Devstral: only their language model."""

from typing import Any

from radixrt.worker.model.families import ministral3, mistral, mistral4
from radixrt.worker.model.spec.fields import text_config
from radixrt.worker.model.spec.spec import ModelSpec

PARTS = {"mistral": mistral.spec, "ministral3": ministral3.spec, "mistral4": mistral4.spec}


def spec(config: dict[str, Any]) -> ModelSpec:
    """By the family that `text_config` names; ValueError if it is none of PARTS. In `mistral`, `layer_types` is
    ignored: all layers have the window."""
    family = config["text_config"].get("model_type", "mistral")
    if family not in PARTS:
        raise ValueError(f"text_config: model_type {family!r} is not served; {', '.join(PARTS)} are")
    text = text_config({"tie_word_embeddings": True} | config)
    return PARTS[family](text | {"layer_types": None} if family == "mistral" else text)
