"""Qwen3-VL, dense: the part of it that is for text."""

from __future__ import annotations

from typing import Any

from radixrt.worker.model import qwen3
from radixrt.worker.model.spec import ModelSpec, text_part

DEFAULTS = {"rope_theta": 5e5, "num_key_value_heads": 32, "max_position_embeddings": 128_000}
"""Of transformers, in place of what a file leaves out."""


def spec(config: dict[str, Any]) -> ModelSpec:
    """Of text alone, the three positions of a token (M-RoPE) are one. No layer has a window."""
    return qwen3.spec(DEFAULTS | text_part(config) | {"use_sliding_window": False})
