"""Granite Swash: Granite with windows, sinks, and a base of positions of each layer's own."""

from __future__ import annotations

from typing import Any

from radixrt.worker.model import granite
from radixrt.worker.model.spec import ModelSpec, layer_windows, rope_parameters

DEFAULTS = {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
DEFAULTS |= {"max_position_embeddings": 8192}
"""Of transformers, in place of what a file leaves out."""


def spec(config: dict[str, Any]) -> ModelSpec:
    """As Granite."""
    config = DEFAULTS | config
    return granite.spec(config, **windowed(config))


def windowed(config: dict[str, Any]) -> dict[str, Any]:
    """What differs from Granite, for `common`. By `layer_types`; every fourth layer attends to all where a file has
    none, the first one too. `layer_rope_theta` has the bases, 0 where nothing is rotated."""
    layers, rope = config["num_hidden_layers"], rope_parameters(config)
    kinds = config.get("layer_types") or [("sliding", "full")[i % 4 == 0] + "_attention" for i in range(layers)]
    bases = config.get("layer_rope_theta") or [rope["rope_theta"]] * layers
    return {
        "windows": layer_windows({"sliding_window": 128} | config | {"layer_types": kinds}),
        "layer_ropes": tuple(rope | {"rope_theta": base} if base else None for base in bases),
        "sinks": True,
    }
