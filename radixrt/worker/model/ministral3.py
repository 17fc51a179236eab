"""Ministral 3 and Devstral 2: Mistral with positions that are stretched, and queries that grow with them."""

from __future__ import annotations

import dataclasses
from typing import Any

from radixrt.worker.model import mistral
from radixrt.worker.model.spec import ModelSpec

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384}
YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
DEFAULTS = {"head_dim": 128, "sliding_window": None, "rms_norm_eps": 1e-5, "max_position_embeddings": 262_144}
"""Of transformers, in place of what a file leaves out."""


def spec(config: dict[str, Any]) -> ModelSpec:
    """`llama_4_scaling_beta` says how fast queries grow."""
    config = DEFAULTS | config
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        config["rope_parameters"] = dict(YARN)
    return with_growth(mistral.spec(config | {"layer_types": None}))


def with_growth(spec: ModelSpec) -> ModelSpec:
    """By what its file says of positions."""
    beta = spec.rope.get("llama_4_scaling_beta")
    growth = (beta, spec.rope["original_max_position_embeddings"]) if beta else None
    return dataclasses.replace(spec, query_growth=growth)
