"""GLM-4.1V: the part of it that is for text."""

from __future__ import annotations

from typing import Any

from radixrt.worker.model import glm4
from radixrt.worker.model.spec import ModelSpec, text_part

DEFAULTS = {"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0, "max_position_embeddings": 32_768}
"""Of transformers, in place of what a file leaves out."""


def spec(config: dict[str, Any]) -> ModelSpec:
    """Of text alone, the three positions of a token (M-RoPE) are one. Heads divide the hidden state."""
    return glm4.spec(DEFAULTS | text_part(config) | {"head_dim": None, "attention_bias": True})
