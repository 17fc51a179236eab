"""GLM-4 and GLM-Z1 of April 2025 (0414), 9b and 32b: GLM-4 9b with additional norms after attention and MLP."""

from typing import Any

from radixrt.worker.model.families import glm
from radixrt.worker.model.spec.norms_spec import NormsSpec
from radixrt.worker.model.spec.spec import ModelSpec

NORMS = NormsSpec(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")


def spec(config: dict[str, Any]) -> ModelSpec:
    """As GLM-4 9b, but for the norms."""
    return glm.spec(config, norms=NORMS)
