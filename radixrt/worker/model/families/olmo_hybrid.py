"""OLMo Hybrid: three of four layers have linear attention, with norms before it; the others are as in OLMo 2."""

import dataclasses
from typing import Any

from radixrt.worker.model.families import olmo2
from radixrt.worker.model.families.qwen3_next import FULL, LINEAR, check_kinds, delta
from radixrt.worker.model.spec.fields import check_served
from radixrt.worker.model.spec.norms_spec import NormsSpec
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = {"linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True, "rms_norm_eps": 1e-6}
DEFAULTS |= {"max_position_embeddings": 65_536}
OTHER_NAMES = ((".input_layernorm", ".attention_layer_norm"), (".post_attention_layernorm", ".feedforward_layer_norm"))


def spec(config: dict[str, Any]) -> ModelSpec:
    """Without `layer_types`, layers 3, 7, 11, ... have attention, or else the last one. The published
    models have no RoPE, which a `rope_theta` of null in `rope_parameters` says."""
    check_served(config, {"hidden_act": "silu"})
    config = DEFAULTS | {name: value for name, value in config.items() if value is not None}
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    kinds = config.get("layer_types") or [FULL if i % 4 == 3 else LINEAR for i in range(layers)]
    if not config.get("layer_types") and FULL not in kinds:
        kinds[-1] = FULL
    check_kinds(kinds, layers)
    key_heads = config.setdefault("linear_num_key_heads", heads)
    config.setdefault("linear_num_value_heads", heads)
    key_dim = config.setdefault("linear_key_head_dim", int(0.75 * config["hidden_size"] / key_heads))
    config.setdefault("linear_value_head_dim", 2 * key_dim)
    linear = delta(
        config,
        kinds,
        qkv=("q_proj", "k_proj", "v_proj"),
        z="g_proj",
        b="b_proj",
        a="a_proj",
        norm="o_norm",
        out="o_proj",
        norm_eps=1e-5,
        beta_factor=2.0 if config["linear_allow_neg_eigval"] else 1.0,
        norms=NormsSpec(float32_weight=True),
    )
    plain = olmo2.spec(config, recurrent=linear, other_names=OTHER_NAMES)
    has_rope = (config.get("rope_parameters") or {"rope_theta": 10_000.0}).get("rope_theta") is not None
    return plain if has_rope else dataclasses.replace(plain, layer_ropes=(None,) * layers)
