"""Youtu-LLM: latent attention as in DeepSeek V3, without experts."""

from typing import Any

from radixrt.worker.model.families import deepseek_v2
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = {"rope_interleave": True, "tie_word_embeddings": True, "max_position_embeddings": 131_072}


def spec(config: dict[str, Any]) -> ModelSpec:
    """MLPs have no biases."""
    config = deepseek_v2.DEFAULTS | DEFAULTS | config | {"mlp_bias": False}
    return deepseek_v2.latent_decoder(config, interleaved=bool(config["rope_interleave"]))
