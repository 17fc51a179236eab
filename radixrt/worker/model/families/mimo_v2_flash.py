"""MiMo-V2-Flash: sliding windows with sinks and twice as many KV heads in most layers; values that are smaller than
keys, and scaled; experts as in DeepSeek V3."""

from typing import Any

from radixrt.worker.model.families.deepseek_v3 import sigmoid_routing
from radixrt.worker.model.spec.expert_spec import ExpertsSpec
from radixrt.worker.model.spec.fields import (
    check_served,
    common,
    layer_windows,
    moe_layers,
    partial_rotary_dim,
    rope_parameters,
    with_experts,
)
from radixrt.worker.model.spec.spec import LayerSpec, ModelSpec

DEFAULTS: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "sliding_window": 129}
DEFAULTS |= {"max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "attention_value_scale": 0.707}
DEFAULTS |= {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "norm_topk_prob": True}
DEFAULTS |= {"rope_theta": 5e6, "swa_rope_theta": 1e4, "partial_rotary_factor": 0.334}
SERVED: dict[str, Any] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_shared_experts": None}
SERVED |= {"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False}
"""The only values of these fields that are served: those of the published model."""
OTHER_NAMES = ((".self_attn.sinks", ".self_attn.attention_sink_bias"),)


def spec(config: dict[str, Any]) -> ModelSpec:
    """Without `layer_types`, layers 0, 5, 11, 17, ... have full attention. The published file has the window without
    the token itself, as `sliding_window_size`. Only layers with windows have sinks. Fields that transformers does not
    read must agree."""
    check_served(config, SERVED)
    if "attention_value_scale" in config:
        config = config | {"attention_value_scale": config["attention_value_scale"] or 1.0}
    config = DEFAULTS | {name: value for name, value in config.items() if value is not None}
    if "sliding_window_size" in config:
        config["sliding_window"] = config["sliding_window_size"] + 1
    numbers = range(config["num_hidden_layers"])
    kinds = config.get("layer_types") or [("sliding" if i and (i + 1) % 6 else "full") + "_attention" for i in numbers]
    config |= {"layer_types": kinds}
    same = {"swa_head_dim": config["head_dim"], "swa_v_head_dim": config["v_head_dim"]}
    same |= {"swa_num_key_value_heads": 2 * config["num_key_value_heads"]}
    check_served(config, same | {"hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in kinds]})
    ropes = {kind: _rope(config, kind) for kind in set(kinds)}
    plain = common(
        config | {"rope_parameters": None, "rope_scaling": None},
        windows=layer_windows(config),
        layer_ropes=tuple(ropes[kind] for kind in kinds),
        layers=tuple(_layer(config, kind == "sliding_attention") for kind in kinds),
        qkv_bias=bool(config.get("attention_bias")),
        other_names=OTHER_NAMES,
    )
    if plain.num_heads % (2 * plain.num_kv_heads) and "sliding_attention" in kinds:
        twice = f"num_key_value_heads {plain.num_kv_heads}: twice as many"
        raise ValueError(f"{twice} do not divide {plain.num_heads} heads")
    experts = ExpertsSpec(
        count=config["n_routed_experts"],
        top_k=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"],
        normalized=bool(config["norm_topk_prob"]),
        layers=moe_layers(config, dense=1),
        routing=sigmoid_routing(config, float32_weight=True),
    )
    return with_experts(plain, experts)


def _layer(config: dict[str, Any], windowed: bool) -> LayerSpec:
    kv_heads = config["num_key_value_heads"] * (2 if windowed else 1)
    return LayerSpec(
        kv_heads, config["head_dim"], config["v_head_dim"], config["intermediate_size"], sinks=windowed,
        value_factor=config["attention_value_scale"],
    )  # fmt: skip


def _rope(config: dict[str, Any], kind: str) -> dict[str, Any]:
    theta = config["swa_rope_theta" if kind == "sliding_attention" else "rope_theta"]
    plain = {"rope_type": "default", "rope_theta": theta}
    own = plain | ((config.get("rope_parameters") or {}).get(kind) or {})
    rope = rope_parameters(config | {"rope_scaling": None, "rope_parameters": own})
    return rope | {"rotated": partial_rotary_dim(config, rope, config["head_dim"]) or config["head_dim"]}
