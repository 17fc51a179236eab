"""Arcee's AFM: Llama with MLPs without a gate, whose activation is squared ReLU."""

import dataclasses
from typing import Any

from radixrt.worker.model.families import llama
from radixrt.worker.model.spec.fields import check_served
from radixrt.worker.model.spec.spec import SQUARED_RELU, ModelSpec


def spec(config: dict[str, Any]) -> ModelSpec:
    """As Llama, but for the activation."""
    check_served(config, {"hidden_act": SQUARED_RELU})
    config = {"rms_norm_eps": 1e-5} | config | {"hidden_act": "silu"}
    return dataclasses.replace(llama.spec(config), activation=SQUARED_RELU)
