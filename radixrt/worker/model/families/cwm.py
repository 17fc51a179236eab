"""CWM, Meta's Code World Model: Llama with sliding windows in three of four layers."""

from typing import Any

from radixrt.worker.model.families import llama
from radixrt.worker.model.spec.fields import layer_windows
from radixrt.worker.model.spec.spec import ModelSpec

ROPE = {"rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 8192}
DEFAULTS = {"head_dim": 128, "num_key_value_heads": 8, "sliding_window": 8192, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
DEFAULTS |= {"max_position_embeddings": 131_072}


def spec(config: dict[str, Any]) -> ModelSpec:
    """Without `layer_types`, layers 0, 4, 8, ... have full attention. Attention has no biases."""
    config = DEFAULTS | config | {"attention_bias": False}
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        config["rope_parameters"] = ROPE
    layers = config["num_hidden_layers"]
    if not config.get("layer_types"):
        config["layer_types"] = [("sliding", "full")[i % 4 == 0] + "_attention" for i in range(layers)]
    return llama.spec(config, windows=layer_windows(config))
