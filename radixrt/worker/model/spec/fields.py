"""Specs from the fields of a checkpoint's `config.json` that families share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from radixrt.worker.model.spec.expert_spec import ExpertsSpec
from radixrt.worker.model.spec.spec import ModelSpec, with_features

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu"}
ACTIVATIONS |= dict.fromkeys(("gelu_pytorch_tanh", "gelu_new"), "gelu_pytorch_tanh")
"""`hidden_act` of config.json -> activation of `layers`. Some functions have several names; `gelu_new` is the tanh
approximation."""


def common(
    config: dict[str, Any], partial_rotary: bool = False, attention_bias: bool = False, **features: Any
) -> ModelSpec:
    """A spec from the fields of config.json whose names most families share, and from `features`, other fields of
    ModelSpec and its parts. With `partial_rotary`, config.json may have a `partial_rotary_factor`; with
    `attention_bias`, a field of that name, which is for all projections of attention. ValueError names a bad field,
    KeyError a missing one."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    activation = config.get("hidden_act", "silu")
    longest = context(config)
    windows = features.pop("windows", None) or (None,) * config["num_hidden_layers"]
    rope = rope_parameters(config)
    if partial_rotary:
        features["rotary_dim"] = partial_rotary_dim(config, rope, head_dim)
    if attention_bias:
        features |= dict.fromkeys(("qkv_bias", "output_bias"), bool(config.get("attention_bias")))
    spec = ModelSpec(
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        max_model_len=longest,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope=rope,
        activation=ACTIVATIONS.get(activation, ""),
        tied=bool(config.get("tie_word_embeddings", False)),
        windows=tuple(None if window is None or window >= longest else window for window in windows),
    )
    spec = with_features(spec, **features)
    if not spec.activation:
        raise ValueError(f"hidden_act {activation!r} is not served; {', '.join(ACTIVATIONS)} are")
    if spec.num_heads % spec.num_kv_heads:
        raise ValueError(f"num_key_value_heads {spec.num_kv_heads} does not divide {spec.num_heads} heads")
    return spec


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a multimodal model's language model: `text_config`, or in older files, which have none, the whole
    config.json. Embeddings are tied if either of the two says so."""
    text = dict(config.get("text_config") or config)
    if config.get("tie_word_embeddings"):
        text["tie_word_embeddings"] = True
    return text


def partial_rotary_dim(config: Mapping[str, Any], rope: dict[str, Any], head_dim: int) -> int | None:
    """Elements of a head that RoPE rotates, by `partial_rotary_factor` in `rope` or `config`; None: all. Removes the
    factor from `rope`, whose frequencies are then those of a head of the returned size."""
    factor = rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    rotary_dim = int(head_dim * factor)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ValueError(f"partial_rotary_factor {factor}: {rotary_dim} of {head_dim} elements cannot be rotated")
    return rotary_dim if rotary_dim < head_dim else None


def with_experts(spec: ModelSpec, experts: ExpertsSpec) -> ModelSpec:
    """The same model with experts. ValueError if experts cannot be selected that way."""
    if not 1 <= experts.top_k <= experts.count:
        raise ValueError(f"num_experts_per_tok {experts.top_k} of {experts.count} experts")
    routing = experts.routing
    if routing.groups < 1 or experts.count % routing.groups:
        raise ValueError(f"n_group {routing.groups} does not divide {experts.count} experts")
    if not 1 <= routing.kept_groups <= routing.groups:
        raise ValueError(f"topk_group {routing.kept_groups} of n_group {routing.groups}")
    size = experts.count // routing.groups
    if experts.top_k > routing.kept_groups * size or (routing.sigmoid and routing.grouped and size < 2):
        raise ValueError(f"topk_group {routing.kept_groups}: groups of {size} are too small")
    return dataclasses.replace(spec, experts=experts)


def moe_layers(config: Mapping[str, Any], dense: int) -> frozenset[int]:
    """Layers with experts, by `mlp_layer_types`; without it, all but the first `dense` layers."""
    layers = range(config["num_hidden_layers"])
    kinds = config.get("mlp_layer_types") or [("dense", "sparse")[i >= dense] for i in layers]
    return frozenset(i for i in layers if kinds[i] == "sparse")


def check_served(config: Mapping[str, Any], served: Mapping[str, Any]) -> None:
    """ValueError if config.json has one of the fields `served` with another value."""
    for name, value in served.items():
        if config.get(name, value) != value:
            raise ValueError(f"{name} {config[name]!r} is not served; {value!r} is")


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE parameters: `rope_scaling` (transformers 4, or added by users), or else `rope_parameters` (transformers 5).
    `rope_type`, `rope_theta`, `max_position_embeddings` and `original_max_position_embeddings` are added to it; files
    have them in various places. ValueError if the parameters differ by layer type (see `ropes_by_kind`)."""
    given = config.get("rope_parameters") or {}
    parameters = dict(config.get("rope_scaling") or given)
    if any(isinstance(value, dict) for value in parameters.values()):
        raise ValueError("rope_parameters that differ by layer are not served")
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    parameters.setdefault("rope_theta", given.get("rope_theta", config.get("rope_theta", 10_000.0)))
    longest = parameters.setdefault("max_position_embeddings", config["max_position_embeddings"])
    original = config.get("original_max_position_embeddings")
    original = original or parameters.get("original_max_position_embeddings") or longest
    parameters["original_max_position_embeddings"] = original
    return parameters


def ropes_by_kind(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By layer type (`layer_types`): the config as if all layers were of that type, for `rope_parameters` and `common`.

    `rope_parameters` may have an entry for each type. In older files `rope_scaling` is for full attention only, and
    `rope_local_base_freq` is the `rope_theta` of sliding windows. `original_max_position_embeddings` counts only
    within these parameters, not beside them."""
    by_kind = config.get("rope_parameters") or {}
    config = config | {"original_max_position_embeddings": None}
    local = {"rope_scaling": None, "rope_theta": config.get("rope_local_base_freq", config["rope_theta"])}
    return {
        "full_attention": config | {"rope_parameters": by_kind.get("full_attention")},
        "sliding_attention": config | local | {"rope_parameters": by_kind.get("sliding_attention")},
    }


def context(config: Mapping[str, Any]) -> int:
    """The longest context in tokens: `max_position_embeddings`, which linear scaling extends by its factor. With YaRN,
    files have the extended length or the original one there: then the latter times the factor counts."""
    rope, longest = rope_parameters(config), config["max_position_embeddings"]
    factor = rope.get("factor") or 1.0
    match rope["rope_type"]:
        case "yarn":
            return max(longest, int(factor * rope["original_max_position_embeddings"]))
        case "linear":
            return int(factor * longest)
    return longest


def layer_kinds(config: Mapping[str, Any], every: int) -> list[str]:
    """`layer_types`; without it, every `every`-th layer has full attention, the others a sliding window."""
    layers = range(config["num_hidden_layers"])
    return config.get("layer_types") or [("sliding", "full")[(i + 1) % every == 0] + "_attention" for i in layers]


def layer_windows(config: dict[str, Any]) -> tuple[int | None, ...]:
    """By layer: the sliding window or None, by `layer_types`; without it, layers from `max_window_layers` on have one
    (Qwen)."""
    layers = config["num_hidden_layers"]
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if kinds:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = config["max_window_layers"]
    return tuple(window if layer >= first else None for layer in range(layers))
