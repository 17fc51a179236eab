"""Nemotron 3, Nemotron 4 and Minitron: LayerNorms of 1 + weight, MLPs with squared ReLU, partial RoPE."""

import dataclasses
from typing import Any

from radixrt.worker.model.families import llama
from radixrt.worker.model.families.starcoder2 import NORMS
from radixrt.worker.model.spec.fields import check_served
from radixrt.worker.model.spec.spec import SQUARED_RELU, ModelSpec

DEFAULTS = {"max_position_embeddings": 4096, "norm_eps": 1e-5, "partial_rotary_factor": 0.5}


def spec(config: dict[str, Any]) -> ModelSpec:
    """As Llama, but for norms and activation."""
    check_served(config, {"hidden_act": SQUARED_RELU})
    config = DEFAULTS | config
    plain = llama.spec(
        config | {"hidden_act": "silu", "rms_norm_eps": config["norm_eps"]},
        partial_rotary=True,
        norms=dataclasses.replace(NORMS, offset=1.0),
    )
    return dataclasses.replace(plain, activation=SQUARED_RELU)
