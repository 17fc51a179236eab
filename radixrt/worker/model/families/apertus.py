"""Apertus: Llama with norms of q and k, and MLPs without a gate, whose activation is xIELU."""

import dataclasses
from typing import Any

from radixrt.worker.model.families import llama
from radixrt.worker.model.spec.fields import check_served
from radixrt.worker.model.spec.norms_spec import NormsSpec
from radixrt.worker.model.spec.spec import XIELU, ModelSpec

NORMS = NormsSpec(before_attention="attention_layernorm", before_mlp="feedforward_layernorm")
ROPE = {"rope_type": "llama3", "rope_theta": 1.2e7, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 8192}
DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 1.2e7, "max_position_embeddings": 65_536}


def spec(config: dict[str, Any]) -> ModelSpec:
    """Without RoPE parameters, transformers uses ROPE."""
    check_served(config, {"hidden_act": XIELU, "qk_norm": True, "post_norm": False})
    config = DEFAULTS | config | {"hidden_act": "silu", "mlp_bias": False}
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        config["rope_parameters"] = ROPE
    return dataclasses.replace(llama.spec(config, qk_norm=True, norms=NORMS), activation=XIELU)
