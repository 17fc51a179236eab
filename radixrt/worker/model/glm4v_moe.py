"""GLM-4.5V and 4.6V: the part of them that is for text."""

from __future__ import annotations

from typing import Any

from radixrt.worker.model import glm4_moe
from radixrt.worker.model.spec import ModelSpec, text_part

DEFAULTS = {"attention_bias": True, "max_position_embeddings": 65_536}
"""Of transformers, in place of what a file leaves out."""


def spec(config: dict[str, Any]) -> ModelSpec:
    """Of text alone, the three positions of a token (M-RoPE) are one. Heads are not normalized."""
    return glm4_moe.spec(DEFAULTS | text_part(config) | {"use_qk_norm": False})
