"""GPT-NeoX, Pythia: attention and MLP in parallel, each behind a LayerNorm of its own; RoPE of a part of each head."""

from __future__ import annotations

from typing import Any

from radixrt.worker.model.families.starcoder2 import NORMS
from radixrt.worker.model.spec.fields import common
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = {"hidden_act": "gelu", "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "attention_bias": True}
DEFAULTS |= {"rotary_emb_base": 10_000.0, "rotary_pct": 0.25, "use_parallel_residual": True}
"""Defaults of transformers for fields that config.json lacks."""
OTHER_NAMES = (("model.norm.", "model.final_layer_norm."), (".qkv_proj.", ".query_key_value."), (".o_proj.", ".dense."))
OTHER_NAMES += ((".up_proj.", ".dense_h_to_4h."), (".down_proj.", ".dense_4h_to_h."))
NEOX_NAMES = (("model.", "gpt_neox."), ("embed_tokens.", "embed_in."), ("lm_head.", "embed_out."))
NEOX_NAMES += ((".self_attn.", ".attention."), ("gpt_neox.norm.", "gpt_neox.final_layer_norm."))


def spec(config: dict[str, Any]) -> ModelSpec:
    """Without `use_parallel_residual`, the MLP follows attention. There are as many KV heads as query heads."""
    config = DEFAULTS | config
    bias = bool(config["attention_bias"])
    config |= {"rope_theta": config["rotary_emb_base"], "partial_rotary_factor": config["rotary_pct"]}
    return common(
        config | {"rms_norm_eps": config["layer_norm_eps"], "num_key_value_heads": None},
        partial_rotary=True,
        norms=NORMS,
        parallel=bool(config["use_parallel_residual"]),
        fused_qkv=True,
        qkv_by_head=True,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=True,
        ungated=True,
        other_names=NEOX_NAMES + OTHER_NAMES,
    )
