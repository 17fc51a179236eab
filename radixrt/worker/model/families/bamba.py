"""Bamba: Mamba-2 mixers in most layers, attention in the others."""

import dataclasses
from typing import Any

from radixrt.worker.model.spec.fields import check_served, common
from radixrt.worker.model.spec.mamba_spec import linear_layers, read_mamba
from radixrt.worker.model.spec.norms_spec import NormsSpec
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 262_144}
OTHER_NAMES = ((".mlp.", ".feed_forward."), ("model.norm.", "model.final_layernorm."))


def spec(config: dict[str, Any]) -> ModelSpec:
    """Layers `attn_layer_indices` have attention. RoPE rotates half of a head, whatever config.json says."""
    check_served(config, {"hidden_act": "silu"})
    config = DEFAULTS | config
    attention = config.get("attn_layer_indices") or []
    kinds = ["attention" if i in attention else "mamba" for i in range(config["num_hidden_layers"])]
    mamba = read_mamba(config, linear_layers(kinds, config))
    plain = common(
        config | {"partial_rotary_factor": 0.5},
        partial_rotary=True,
        norms=NormsSpec(before_mlp="pre_ff_layernorm"),
        attention_bias=True,
        mlp_bias=bool(config.get("mlp_bias")),
        other_names=OTHER_NAMES,
    )
    return dataclasses.replace(plain, recurrent=mamba)
