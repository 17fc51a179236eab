"""SmolLM3: Llama without RoPE in every fourth layer."""

from typing import Any

from radixrt.worker.model.spec.fields import common, layer_windows, rope_parameters
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = {"num_key_value_heads": 4, "no_rope_layer_interval": 4, "rope_theta": 2e6, "tie_word_embeddings": True}


def spec(config: dict[str, Any]) -> ModelSpec:
    """`no_rope_layers` has a 1 for each layer with RoPE, in spite of its name. Without `layer_types`, layers without
    RoPE have a window, if `use_sliding_window`."""
    config = DEFAULTS | {"use_sliding_window": False} | config
    layers, every = config["num_hidden_layers"], config["no_rope_layer_interval"]
    uses_rope = config.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(layers)]
    if not config.get("layer_types"):
        has_windows = bool(config["use_sliding_window"])
        config["layer_types"] = [("full", "sliding")[has_windows and not i] + "_attention" for i in uses_rope]
    return common(
        config,
        windows=layer_windows(config),
        layer_ropes=tuple(rope_parameters(config) if i else None for i in uses_rope[:layers]),
        attention_bias=True,
        mlp_bias=bool(config.get("mlp_bias")),
    )
