"""GLM-4.1V: only its language model."""

from typing import Any

from radixrt.worker.model.families import glm4
from radixrt.worker.model.spec.fields import text_config
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = {"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0, "max_position_embeddings": 32_768}


def spec(config: dict[str, Any]) -> ModelSpec:
    """For text, the three positions of M-RoPE are the same, which makes it RoPE. `head_dim` is ignored."""
    return glm4.spec(DEFAULTS | text_config(config) | {"head_dim": None, "attention_bias": True})
