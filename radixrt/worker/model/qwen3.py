"""Qwen3, dense."""

from __future__ import annotations

from typing import Any

from radixrt.worker.model.spec import ModelSpec, common, layer_windows

DEFAULTS = {"use_sliding_window": False, "max_window_layers": 28, "head_dim": 128, "num_key_value_heads": 32}
"""Of transformers, in place of what a file leaves out."""


def spec(config: dict[str, Any]) -> ModelSpec:
    """Each head of q and k is normalized; windows only with `use_sliding_window`."""
    config = DEFAULTS | config
    bias = bool(config.get("attention_bias"))
    windows = layer_windows(config) if config["use_sliding_window"] else ()
    return common(config, qk_norm=True, qkv_bias=bias, output_bias=bias, windows=windows)
