"""SmolLM3: every fourth layer knows no positions."""

from __future__ import annotations

from typing import Any

from radixrt.worker.model.spec import ModelSpec, common, layer_windows, rope_parameters

DEFAULTS = {"num_key_value_heads": 4, "no_rope_layer_interval": 4, "rope_theta": 2e6, "tie_word_embeddings": True}


def spec(config: dict[str, Any]) -> ModelSpec:
    """`no_rope_layers` has a 1 for layers that do. Windows by `layer_types`, or with `use_sliding_window` in those that
    do not."""
    config = DEFAULTS | {"use_sliding_window": False} | config
    layers, every = config["num_hidden_layers"], config["no_rope_layer_interval"]
    turned = config.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(layers)]
    if not config.get("layer_types"):
        windowed = bool(config["use_sliding_window"])
        config["layer_types"] = [("full", "sliding")[windowed and not i] + "_attention" for i in turned]
    bias = bool(config.get("attention_bias"))
    return common(
        config,
        windows=layer_windows(config),
        layer_ropes=tuple(rope_parameters(config) if i else None for i in turned[:layers]),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(config.get("mlp_bias")),
    )
