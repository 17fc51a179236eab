"""Qwen2-VL: the part of it that is for text."""

from __future__ import annotations

from typing import Any

from radixrt.worker.model import qwen2
from radixrt.worker.model.spec import ModelSpec, text_part

DEFAULTS = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_window_layers": 80}
DEFAULTS |= {"max_position_embeddings": 32_768}
"""Of transformers, in place of what a file leaves out."""


def spec(config: dict[str, Any]) -> ModelSpec:
    """Of text alone, the three positions of a token (M-RoPE) are one. Heads divide the hidden state."""
    text = DEFAULTS | text_part(config) | {"head_dim": None}
    for name in ("rope_scaling", "rope_parameters"):
        rope = dict(text.get(name) or {})
        if rope.get("rope_type", rope.get("type")) == "mrope":
            text[name] = rope | {"rope_type": "default"}
    return qwen2.spec(text)
