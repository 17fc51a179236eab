"""Ministral 3 and Devstral 2: Mistral with YaRN, and with queries that are scaled by position."""

from typing import Any

from radixrt.worker.model.families import mistral
from radixrt.worker.model.spec.spec import ModelSpec, QueryScaling, with_features

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384}
YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
DEFAULTS = {"head_dim": 128, "sliding_window": None, "rms_norm_eps": 1e-5, "max_position_embeddings": 262_144}


def spec(config: dict[str, Any]) -> ModelSpec:
    """Without RoPE parameters, transformers uses YARN."""
    config = DEFAULTS | config
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        config["rope_parameters"] = dict(YARN)
    return with_query_scaling(mistral.spec(config | {"layer_types": None}))


def with_query_scaling(spec: ModelSpec) -> ModelSpec:
    """The spec with `query_scaling`, by `llama_4_scaling_beta` of the RoPE parameters."""
    beta = spec.rope.get("llama_4_scaling_beta")
    query_scaling = QueryScaling(beta, spec.rope["original_max_position_embeddings"]) if beta else None
    return with_features(spec, query_scaling=query_scaling)
