"""Command R7B and Command A: Command R with sliding windows in most layers; only these have RoPE."""

from typing import Any

from radixrt.worker.model.families import cohere
from radixrt.worker.model.spec.fields import layer_kinds, layer_windows, rope_parameters
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = {"sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 1e4}


def spec(config: dict[str, Any]) -> ModelSpec:
    """Without `layer_types`, every `sliding_window_pattern`-th layer has full attention."""
    config = DEFAULTS | config
    config["layer_types"] = layer_kinds(config, config["sliding_window_pattern"])
    return with_windows(config)


def with_windows(config: dict[str, Any], rope_layers: frozenset[int] = frozenset(), **features: Any) -> ModelSpec:
    """By `layer_types`. Layers in `rope_layers` have RoPE even without a window. `features`: other fields of ModelSpec,
    for derived families."""
    windowed, rope = [kind == "sliding_attention" for kind in config["layer_types"]], rope_parameters(config)
    if any(windowed) and config["sliding_window"] is None:
        raise ValueError("sliding_window null is not served where layer_types have windows")
    ropes = tuple(rope if window or i in rope_layers else None for i, window in enumerate(windowed))
    return cohere.spec(config, windows=layer_windows(config), layer_ropes=ropes, **features)
