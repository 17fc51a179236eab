"""Granite Swash: Granite with sliding windows, attention sinks, and a RoPE base for each layer."""

from typing import Any

from radixrt.worker.model.families import granite
from radixrt.worker.model.spec.fields import layer_windows, rope_parameters
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
DEFAULTS |= {"max_position_embeddings": 8192}


def spec(config: dict[str, Any]) -> ModelSpec:
    """Granite with `layer_features`."""
    config = DEFAULTS | config
    return granite.spec(config, **layer_features(config))


def layer_features(config: dict[str, Any]) -> dict[str, Any]:
    """Fields of ModelSpec in which Swash differs from Granite. Without `layer_types`, layers 0, 4, 8, ... have full
    attention. `layer_rope_theta` has the RoPE base of each layer; 0: no RoPE."""
    layers, rope = config["num_hidden_layers"], rope_parameters(config)
    kinds = config.get("layer_types") or [("sliding", "full")[i % 4 == 0] + "_attention" for i in range(layers)]
    bases = config.get("layer_rope_theta") or [rope["rope_theta"]] * layers
    return {
        "windows": layer_windows({"sliding_window": 128} | config | {"layer_types": kinds}),
        "layer_ropes": tuple(rope | {"rope_theta": base} if base else None for base in bases),
        "sinks": True,
    }
