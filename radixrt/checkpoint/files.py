"""The JSON files beside a checkpoint's weights: a value that is not of the kind that its readers expect is named before
one of them meets it."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from radixrt.config import MAX_TOKENS, Form

FOLDER = Path(__file__).parents[1] / "worker" / "model" / "families"
FAMILIES = tuple(sorted(file.name for file in iter_modules([str(FOLDER)])))
"""Every `model_type` that has a file, of which only the name is read here."""
SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model.v*")
"""Patterns of a sentencepiece model's name, the likeliest first."""
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


MAX_LAYERS = 4096
MAX_WIDTH = 1 << 20
"""The largest number of a model's sizes: elements, heads, experts."""
MAX_TOKEN_ID = (1 << 22) - 1
"""Tables by token id have a place for each smaller one."""


def _is_whole(value: Any, least: int = 0, most: int = MAX_TOKENS) -> bool:
    return type(value) is int and least <= value <= most


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) < 1e18


def _are(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def _are_tokens(values: Any) -> bool:
    values = values.values() if isinstance(values, dict) else values if isinstance(values, list) else [None]
    return all(map(_is_token, values))


def _is_named_token(value: Any) -> bool:
    """Its content may be null: then there is none."""
    return _is_token(value) or (isinstance(value, dict) and value.get("content") is None)


def _are_declared(values: Any) -> bool:
    return isinstance(values, dict) and all(
        key.isdecimal() and key.isascii() and len(key) < 10 and int(key) <= MAX_TOKEN_ID and _is_declared(value)
        for key, value in values.items()
    )


def _is_declared(value: Any) -> bool:
    return isinstance(value, dict) and _is_token(value)


def _are_ids(value: Any) -> bool:
    return all(map(_is_whole, value)) if isinstance(value, list) else _is_whole(value)


def are_templates(value: Any) -> bool:
    """Chat templates as files have them: one, or several by name."""
    if isinstance(value, dict):
        return all(isinstance(template, str) for template in value.values())
    fields = ("name", "template")
    named = _are(dict, value) and all(isinstance(one.get(name), str) for one in value for name in fields)
    return named or isinstance(value, str)


SIZE = Form(lambda value: _is_whole(value, 1), f"a number from 1 to {MAX_TOKENS}")
COUNT = Form(_is_whole, f"a number from 0 to {MAX_TOKENS}")
LAYERS = Form(lambda value: _is_whole(value, 1, MAX_LAYERS), f"a number from 1 to {MAX_LAYERS}")
WIDTH = Form(lambda value: _is_whole(value, 1, MAX_WIDTH), f"a number from 1 to {MAX_WIDTH}")
WIDTH_OR_NONE = Form(lambda value: _is_whole(value, 0, MAX_WIDTH), f"a number from 0 to {MAX_WIDTH}")
ROWS = Form(lambda value: _is_whole(value, 1, MAX_TOKEN_ID + 1), f"a number from 1 to {MAX_TOKEN_ID + 1}")
TOKEN_ID = Form(lambda value: _is_whole(value, 0, MAX_TOKEN_ID), f"a number from 0 to {MAX_TOKEN_ID}")
COUNT_OF_LAYERS = Form(lambda value: _is_whole(value, 0, MAX_LAYERS), f"a number from 0 to {MAX_LAYERS}")
NUMBER = Form(_is_number, "a number")
POSITIVE = Form(lambda value: _is_number(value) and value > 0, "a number above 0")
FLAG = Form(lambda value: isinstance(value, bool), "true or false")
STRING = Form(lambda value: isinstance(value, str), "a string")
SIZE_OR_AUTO = Form(lambda value: value == "auto" or _is_whole(value, 1), f"auto or {SIZE.words}")
STRINGS = Form(lambda value: _are(str, value), "a list of strings")
NUMBERS = Form(lambda value: isinstance(value, list) and all(map(_is_number, value)), "a list of numbers")
COUNTS = Form(lambda x: all(map(_is_whole, x if isinstance(x, list) else [x])), "a number, or a list of some")
LIST = Form(lambda value: isinstance(value, list), "a list")
OBJECT = Form(lambda value: isinstance(value, dict), "an object")
IDS = Form(_are_ids, "a token id, or a list of some")
TOKEN = Form(_is_named_token, "a string, or an object with its content")
TOKENS = Form(_are_tokens, "a list of strings or objects with their content, or an object of these")
DECLARED = Form(_are_declared, "an object of objects with a content, by token ids")
TEMPLATES = Form(are_templates, "a string, or a list of objects with a name and a template")

Table = Mapping[str, "Form | Table"]
"""What fields may be that are there and not null; a table for an object."""
ANY = "*"
"""In a table: all other fields."""

ROPE: dict[str, Any] = dict.fromkeys(("rope_type", "type"), STRING)
ROPE |= dict.fromkeys(("short_factor", "long_factor"), NUMBERS)
ROPE |= dict.fromkeys(
    ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale",
     "mscale_all_dim", "long_mscale", "short_mscale", "partial_rotary_factor", "original_max_position_embeddings",
     "alpha"),
    NUMBER,
)  # fmt: skip
ROPE |= {"rope_theta": POSITIVE, "full_attention": ROPE, "sliding_attention": ROPE}

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
GIVEN_COUNTS = ("shared_expert_intermediate_size", "moe_num_shared_experts", "moe_layer_start_index")
GIVEN_NUMBERS = ("moe_layer_end_index", "moe_norm_min", "layer_norm_eps", "logit_scale", "norm_epsilon", "rotary_pct",
                 "router_jitter_noise")  # fmt: skip
"""Of some families, for which null is no value."""
LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
DELTA = ("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
         "linear_num_value_heads", "full_attention_interval", "linear_num_heads", "linear_head_dim",
         "model_max_length", "conv_L_cache", "mamba_d_ssm", "block_multiple_of")  # fmt: skip
MAMBA = ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_num_heads",
         "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")  # fmt: skip
TEXT: dict[str, Any] = dict.fromkeys(
    (
        *SIZES,
        *DELTA,
        "num_key_value_heads",
        "head_dim",
        "decoder_sparse_step",
        "global_head_dim",
        "num_global_key_value_heads",
        "sliding_window_size",
        "no_rope_layer_interval",
        "interleave_moe_layer_step",
        "floor_scale",
        "attention_chunk_size",
        "intermediate_size_mlp",
    ),
    SIZE,
)
TEXT |= dict.fromkeys(MAMBA, SIZE) | {"mamba_d_head": SIZE_OR_AUTO, "attn_layer_indices": COUNTS}
TEXT |= dict.fromkeys(
    ("intermediate_size", "sliding_window", "max_window_layers", "rotary_dim",
     "original_max_position_embeddings", "moe_intermediate_size", "num_experts", "num_local_experts",
     "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "experts_per_token", "first_k_dense_replace",
     "n_group", "topk_group", "q_lora_rank", "moe_k", "moe_num_experts", "num_shared_experts",
     "num_dense_layers", "num_experts_per_token", "num_expert_group", "block_ff_dim", "prefix_dense_intermediate_size",
     "shared_intermediate_size", "moe_latent_size", "moe_shared_expert_intermediate_size",
     "hidden_size_per_layer_input", "num_kv_shared_layers", "top_k_experts", *LATENT, *GIVEN_COUNTS),
    COUNT,
)  # fmt: skip
TEXT |= dict.fromkeys(
    ("rms_norm_eps", "routed_scaling_factor", "embedding_multiplier", "attention_multiplier", "residual_multiplier",
     "partial_rotary_factor", "swiglu_limit", "swiglu_alpha", "router_scaling_factor", "route_scale",
     "layer_norm_epsilon", *GIVEN_NUMBERS),
    NUMBER,
)  # fmt: skip
TEXT |= dict.fromkeys(
    ("attention_in_multiplier", "attention_out_multiplier", "key_multiplier", "lm_head_multiplier", "ssm_in_multiplier",
     "ssm_out_multiplier"),
    NUMBER,
) | {"mlp_multipliers": NUMBERS, "ssm_multipliers": NUMBERS}  # fmt: skip
TEXT |= dict.fromkeys(
    ("rope_theta", "rope_local_base_freq", "query_pre_attn_scalar", "logits_scaling", "attn_logit_softcapping",
     "final_logit_softcapping", "clip_qkv", "attn_scale", "swa_rope_theta", "attention_value_scale"),
    POSITIVE,
)  # fmt: skip
TEXT |= dict.fromkeys(
    ("model_type", "hidden_act", "hidden_activation", "topk_method", "hybrid_override_pattern"), STRING
)
TEXT |= dict.fromkeys(("layer_types", "layers_block_type", "mlp_layer_types"), STRINGS)
TEXT |= {
    "linear_attn_config": OBJECT,
    "per_layer_config": OBJECT,
    "norm_eps": NUMBER,
    "block_ffn_dim_multiplier": NUMBER,
    "time_step_limit": LIST,
}
TEXT["mamba_dt_limit"] = LIST
TEXT |= dict.fromkeys(("mlp_only_layers", "full_attn_idxs", "no_rope_layers", "attn_type_list", "moe_layers"), LIST)
TEXT |= {"num_attention_heads_per_layer": COUNTS, "moe_routed_scaling_factor": NUMBER}
TEXT |= dict.fromkeys(("rope_scaling", "rope_parameters"), ROPE)
TEXT |= dict.fromkeys(("quantization_config", "compression_config"), OBJECT)
TEXT |= dict.fromkeys(
    ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "global_head_dim",
     "num_global_key_value_heads", *DELTA[:5], *MAMBA, "linear_num_heads", "linear_head_dim", "mamba_d_ssm",
     "conv_L_cache", "intermediate_size_mlp"),
    WIDTH,
) | dict.fromkeys(
    ("intermediate_size", "rotary_dim", "moe_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts",
     "n_shared_experts", "num_experts_per_tok", "q_lora_rank", "moe_num_experts", "num_shared_experts",
     "shared_intermediate_size", "shared_expert_intermediate_size", "hidden_size_per_layer_input", *LATENT),
    WIDTH_OR_NONE,
) | {"num_hidden_layers": LAYERS, "vocab_size": ROWS}  # fmt: skip
TEXT |= dict.fromkeys(("num_nextn_predict_layers", "mtp_num_hidden_layers"), COUNT_OF_LAYERS)
TEXT |= {"eos_token_id": IDS, "moe_layer_interval": SIZE, "layer_rope_theta": NUMBERS}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "hunyuan_v1_moe": {"moe_intermediate_size": COUNTS, "n_group": None, "topk_group": None},
}
"""In place of what TEXT says, of fields that a family has otherwise; None for those that it does not read."""

NAMED: dict[str, Any] = dict.fromkeys(SPECIAL_NAMES, TOKEN)
NAMED |= dict.fromkeys(("additional_special_tokens", "extra_special_tokens"), TOKENS)
TOKENIZER_CONFIG: dict[str, Any] = NAMED | {"added_tokens_decoder": DECLARED, "chat_template": TEMPLATES}
TOKENIZER_CONFIG |= dict.fromkeys(("add_bos_token", "add_eos_token", "add_prefix_space", "legacy"), FLAG)

OF_TEXT: dict[str, Any] = {"vocab_size": COUNT, "eos_token_id": IDS}
"""All that is read of a model that lends its tokenizer."""
TABLES: dict[str, Table] = {
    "config.json": OF_TEXT | {"text_config": OF_TEXT},
    "generation_config.json": {"eos_token_id": IDS},  # of sampling, what cannot be is left out with a warning
    "tokenizer_config.json": TOKENIZER_CONFIG,
    "special_tokens_map.json": NAMED,
    "added_tokens.json": {ANY: TOKEN_ID},
}


def check_files(folder: str | Path) -> None:
    """ValueError, in one line, names a file of a tokenizer, and what is wrong in it."""
    for name in TABLES:
        read_file(Path(folder, name))


def check_model(folder: str | Path, impl: str = "auto") -> None:
    """The same for a checkpoint, whose config.json says more. Fields that are missing are left to who needs them, and
    all of a family that transformers computes by `impl`, the setting `model_impl`, to its own checks."""
    check_files(folder)
    path = Path(folder, "config.json")
    config = read_file(path)
    if not config:
        raise ValueError(f"{folder} holds no config.json: give the folder of a checkpoint, or ORG/NAME as at the hub")
    family = config.get("model_type")
    if isinstance(family, str) and family not in FAMILIES:  # of others values may be of other kinds
        if impl == "radixrt":
            raise ValueError(not_served(family))
        return
    of_family = OF_FAMILY.get(family, {}) if isinstance(family, str) else {}
    _check(path, "", config, TEXT | of_family | {"text_config": TEXT})
    whole = config | {name: value for name, value in (config.get("text_config") or {}).items() if value is not None}
    for name in _needed(whole):
        if whole.get(name, 0) is None:
            raise ValueError(f"{path}: {name} is null, expected {TEXT[name].words}")


def not_served(family: str) -> str:
    """What is said of a `model_type` that is none of FAMILIES."""
    return f"model_type {family!r} is not served; {', '.join(FAMILIES)} are"


def _needed(config: Mapping[str, Any]) -> Iterator[str]:
    """Fields of a model that null is no value for."""
    yield from (
        *SIZES,
        "full_attention_interval",
        "intermediate_size",
        "moe_layer_interval",
        *GIVEN_COUNTS,
        *GIVEN_NUMBERS,
    )
    if any(config.get(name) is not None for name in LATENT):
        yield from LATENT
    if config.get("n_routed_experts"):
        yield from ("moe_intermediate_size", "num_experts_per_tok")


def read_file(path: Path) -> dict[str, Any]:
    """What a file says, {} if there is none; what is read of any has its kind, or is null. ValueError names the file,
    and what is wrong in it."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())  # NaN and infinities are no JSON, but Python writes them
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a JSON object: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object: it holds {reprlib.repr(content)}")
    _check(path, "", content, TABLES.get(path.name, {}))
    return content


def _check(path: Path, within: str, found: Mapping[str, Any], table: Table) -> None:
    for name, value in found.items():
        kind, field = table.get(name, table.get(ANY)), within + (name if name in table else repr(name))
        if kind is None or value is None:
            continue
        form = kind if isinstance(kind, Form) else OBJECT
        if not form.holds(value):
            raise ValueError(f"{path}: {field} is {reprlib.repr(value)}, expected {form.words}")
        if not isinstance(kind, Form):
            _check(path, f"{field}.", value, kind)
