"""Gemma 3: norms before and after attention and MLP; sliding windows in most layers, with another RoPE base."""

import dataclasses
from typing import Any

from radixrt.worker.model.families.gemma import check_causal
from radixrt.worker.model.spec.fields import common, layer_kinds, layer_windows, rope_parameters, ropes_by_kind
from radixrt.worker.model.spec.norms_spec import NormsSpec
from radixrt.worker.model.spec.spec import ModelSpec

NORMS = NormsSpec(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
    float32_weight=True,
    offset=1.0,
)
DEFAULTS: dict[str, Any] = {"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216}
DEFAULTS |= {"num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
DEFAULTS |= {"max_position_embeddings": 131_072, "sliding_window": 4096, "sliding_window_pattern": 6, "rope_theta": 1e6}
DEFAULTS |= {"rope_local_base_freq": 1e4, "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh"}
DEFAULTS |= {"tie_word_embeddings": True}


def spec(config: dict[str, Any]) -> ModelSpec:
    """Norms have the weight 1 + the stored one; embeddings are multiplied by hidden_size^0.5; the softmax scale is
    query_pre_attn_scalar^-0.5. `max_position_embeddings` includes the extension by `rope_scaling` already."""
    config = DEFAULTS | config
    check_causal(config)
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if config.get(name):
            raise ValueError(f"{name} {config[name]!r} is not served")
    kinds = layer_kinds(config, config["sliding_window_pattern"])
    config |= {"layer_types": kinds, "hidden_act": config["hidden_activation"]}
    by_kind = ropes_by_kind(config)
    plain = common(
        by_kind["full_attention"],
        windows=layer_windows(config),
        layer_ropes=tuple(rope_parameters(by_kind[kind]) for kind in kinds),
        attention_bias=True,
        qk_norm=True,
        norms=NORMS,
        scale_override=config["query_pre_attn_scalar"] ** -0.5,
        embedding_factor=config["hidden_size"] ** 0.5,
    )
    return dataclasses.replace(plain, max_model_len=config["max_position_embeddings"])
