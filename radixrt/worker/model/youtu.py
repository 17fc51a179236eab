"""Youtu-LLM: latent attention as DeepSeek V3's, and no experts."""

from __future__ import annotations

from typing import Any

from radixrt.worker.model import deepseek_v2
from radixrt.worker.model.spec import ModelSpec

DEFAULTS = {"rope_interleave": True, "tie_word_embeddings": True, "max_position_embeddings": 131_072}
"""Of transformers, in place of what a file leaves out."""


def spec(config: dict[str, Any]) -> ModelSpec:
    """MLPs have no biases."""
    config = deepseek_v2.DEFAULTS | DEFAULTS | config | {"mlp_bias": False}
    return deepseek_v2.latent_decoder(config, interleaved=bool(config["rope_interleave"]))
