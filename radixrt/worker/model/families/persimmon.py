"""Persimmon 8b: LayerNorms with biases, also of heads of q and k; MLPs with squared ReLU."""

from __future__ import annotations

import dataclasses
from typing import Any

from radixrt.worker.model.families import gpt_neox, phi
from radixrt.worker.model.families.starcoder2 import NORMS
from radixrt.worker.model.spec.fields import check_served, common
from radixrt.worker.model.spec.spec import SQUARED_RELU, ModelSpec

DEFAULTS = {"max_position_embeddings": 16_384, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5}
DEFAULTS |= {"qk_layernorm": True}
"""Defaults of transformers for fields that config.json lacks."""
OTHER_NAMES = (*gpt_neox.OTHER_NAMES, ("model.final_layer_norm.", "model.final_layernorm."))


def spec(config: dict[str, Any]) -> ModelSpec:
    """There are as many KV heads as query heads."""
    check_served(config, {"hidden_act": SQUARED_RELU})
    config = DEFAULTS | config | {"hidden_act": "silu", "num_key_value_heads": None}
    plain = common(
        config | {"rms_norm_eps": config["layer_norm_eps"]},
        partial_rotary=True,
        norms=NORMS,
        fused_qkv=True,
        qkv_by_head=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_norms=phi.HEAD_NORMS if config["qk_layernorm"] else None,
        other_names=OTHER_NAMES,
    )
    return dataclasses.replace(plain, activation=SQUARED_RELU)
