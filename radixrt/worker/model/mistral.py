"""Mistral 7B and its successors."""

from __future__ import annotations

from typing import Any

from radixrt.worker.model.spec import ModelSpec, common


def spec(config: dict[str, Any]) -> ModelSpec:
    """Every layer has the window `sliding_window`, or none where that is null."""
    config = {"num_key_value_heads": 8, "sliding_window": 4096} | config
    return common(config, windows=(config["sliding_window"],) * config["num_hidden_layers"])
