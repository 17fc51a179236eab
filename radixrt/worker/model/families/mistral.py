"""Mistral 7B and its successors."""

from typing import Any

from radixrt.worker.model.spec.fields import common, layer_windows
from radixrt.worker.model.spec.spec import ModelSpec


def spec(config: dict[str, Any]) -> ModelSpec:
    """Without `layer_types` (which Ministral 8B's file has), every layer has the window `sliding_window`, or none if
    that is null."""
    config = {"num_key_value_heads": 8, "sliding_window": 4096} | config
    config["layer_types"] = config.get("layer_types") or ["sliding_attention"] * config["num_hidden_layers"]
    return common(config, windows=layer_windows(config))
