"""Command R7B and Command A: Command R with windows in most layers, and only these know positions."""

from __future__ import annotations

from typing import Any

from radixrt.worker.model import cohere
from radixrt.worker.model.spec import ModelSpec, layer_kinds, layer_windows, rope_parameters

DEFAULTS = {"sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 1e4}
"""Of transformers, in place of what a file leaves out."""


def spec(config: dict[str, Any]) -> ModelSpec:
    """By `layer_types`, or every `sliding_window_pattern`-th layer attends to all."""
    config = DEFAULTS | config
    config["layer_types"] = layer_kinds(config, config["sliding_window_pattern"])
    return with_windows(config)


def with_windows(config: dict[str, Any], turned: frozenset[int] = frozenset(), **features: Any) -> ModelSpec:
    """By `layer_types`. Layers that are `turned` know positions, too; `features` are a successor's."""
    windowed, rope = [kind == "sliding_attention" for kind in config["layer_types"]], rope_parameters(config)
    if any(windowed) and config["sliding_window"] is None:
        raise ValueError("sliding_window null is not served where layer_types have windows")
    ropes = tuple(rope if window or i in turned else None for i, window in enumerate(windowed))
    return cohere.spec(config, windows=layer_windows(config), layer_ropes=ropes, **features)
