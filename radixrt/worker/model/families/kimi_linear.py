"""Kimi Linear: three of four layers have Kimi Delta Attention; the others latent attention without RoPE."""

import dataclasses
from typing import Any

from radixrt.worker.model.families.deepseek_v2 import latent_decoder, with_routed_experts
from radixrt.worker.model.families.deepseek_v3 import sigmoid_routing
from radixrt.worker.model.families.qwen3_next import FULL, LINEAR, check_kinds
from radixrt.worker.model.spec.delta_spec import DeltaSpec
from radixrt.worker.model.spec.fields import check_served, moe_layers
from radixrt.worker.model.spec.spec import ModelSpec, with_features

DEFAULTS: dict[str, Any] = {"q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
DEFAULTS |= {"v_head_dim": 128, "moe_intermediate_size": 1024, "n_shared_experts": 1, "n_routed_experts": 256}
DEFAULTS |= {"num_experts_per_tok": 8, "routed_scaling_factor": 2.446, "norm_topk_prob": True, "n_group": 1}
DEFAULTS |= {"topk_group": 1, "max_position_embeddings": 1_048_576, "rms_norm_eps": 1e-5}
DEFAULTS |= {"linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4}
NAMES = {"model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob"}
NAMES |= {"num_expert_group": "n_group", "num_experts_per_token": "num_experts_per_tok"}
NAMES |= {"num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts"}
NAMES |= {"num_shared_experts": "n_shared_experts"}
"""Names of fields in published files, and those used here."""
LINEAR_NAMES = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
LINEAR_NAMES |= {"short_conv_kernel_size": "linear_conv_kernel_dim"}
"""The same for the fields of `linear_attn_config`."""
SERVED = {"moe_router_activation_func": "sigmoid", "moe_layer_freq": 1, "mla_use_nope": True, "hidden_act": "silu"}
OTHER_NAMES = tuple(
    (f".self_attn.{name}", f".self_attn.forget_gate.{name}") for name in ("f_a", "f_b", "dt_b", "A_log")
)
OTHER_NAMES += ((".mlp.", ".block_sparse_moe."),)
"""Of transformers 5, and where experts are."""


def spec(config: dict[str, Any]) -> ModelSpec:
    """Which layers are which is said by `layer_types`, or by numbers from 1 in `linear_attn_config`; without both,
    layers 4, 8, 12, ... have attention."""
    check_served(config, SERVED)
    linear = config.get("linear_attn_config") or {}
    config = DEFAULTS | {NAMES.get(name, name): value for name, value in config.items()}
    config |= {LINEAR_NAMES[name]: value for name, value in linear.items() if name in LINEAR_NAMES}
    layers = range(config["num_hidden_layers"])
    kinds = config.get("layer_types")
    if not kinds and "full_attn_layers" in linear:
        kinds = [FULL if i + 1 in linear["full_attn_layers"] else LINEAR for i in layers]
    kinds = kinds or [FULL if i and i % 4 == 0 else LINEAR for i in layers]
    check_kinds(kinds, len(layers))
    heads, size = config["linear_num_heads"], config["linear_head_dim"]
    delta = DeltaSpec(
        layers=frozenset(i for i in layers if kinds[i] == LINEAR),
        key_heads=heads,
        value_heads=heads,
        key_dim=size,
        value_dim=size,
        kernel=config["linear_conv_kernel_dim"],
        name="self_attn",
        qkv=("q_proj", "k_proj", "v_proj"),
        b="b_proj",
        norm="o_norm",
        out="o_proj",
        rank=size,
    )
    plain = with_features(
        latent_decoder(config | {"mlp_bias": False}, interleaved=False),
        recurrent=delta,
        layer_ropes=(None,) * len(layers),
        other_names=OTHER_NAMES,
    )
    sparse = moe_layers(config, config.get("first_k_dense_replace", 1))
    routing = sigmoid_routing(config, float32_weight=True)
    made = with_routed_experts(plain, config, routing, bool(config["norm_topk_prob"]), sparse)
    if made.experts is None:
        return made
    stored = dataclasses.replace(made.experts, prefix="block_sparse_moe", names=("w1", "w3", "w2"))
    return dataclasses.replace(made, experts=stored)
