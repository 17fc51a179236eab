"""GLM-4.5V and 4.6V: only their language model."""

from typing import Any

from radixrt.worker.model.families import glm4_moe
from radixrt.worker.model.spec.fields import text_config
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = {"attention_bias": True, "max_position_embeddings": 65_536}


def spec(config: dict[str, Any]) -> ModelSpec:
    """For text, the three positions of M-RoPE are the same, which makes it RoPE. There are no norms of q
    and k."""
    return glm4_moe.spec(DEFAULTS | text_config(config) | {"use_qk_norm": False})
