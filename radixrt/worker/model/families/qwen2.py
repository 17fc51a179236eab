"""Qwen2 and Qwen2.5."""

from typing import Any

from radixrt.worker.model.spec.fields import common, layer_windows
from radixrt.worker.model.spec.spec import ModelSpec


def spec(config: dict[str, Any], qkv_bias: bool = True) -> ModelSpec:
    """Windows count only with `use_sliding_window`."""
    config = {"use_sliding_window": False, "max_window_layers": 28, "num_key_value_heads": 32} | config
    windows = layer_windows(config) if config["use_sliding_window"] else ()
    return common(config, qkv_bias=qkv_bias, windows=windows)
