"""Qwen3, dense: norms of q and k."""

from typing import Any

from radixrt.worker.model.spec.fields import common, layer_windows
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = {"use_sliding_window": False, "max_window_layers": 28, "head_dim": 128, "num_key_value_heads": 32}


def spec(config: dict[str, Any]) -> ModelSpec:
    """Windows count only with `use_sliding_window`."""
    config = DEFAULTS | config
    windows = layer_windows(config) if config["use_sliding_window"] else ()
    return common(config, qk_norm=True, attention_bias=True, windows=windows)
