"""Qwen3-VL, dense: only its language model."""

from typing import Any

from radixrt.worker.model.families import qwen3
from radixrt.worker.model.spec.fields import text_config
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = {"rope_theta": 5e5, "num_key_value_heads": 32, "max_position_embeddings": 128_000}


def spec(config: dict[str, Any]) -> ModelSpec:
    """For text, the three positions of M-RoPE are the same, which makes it RoPE. There are no windows."""
    return qwen3.spec(DEFAULTS | text_config(config) | {"use_sliding_window": False})
