"""GGUF files of small checkpoints, written by the package `gguf` as llama.cpp's converter writes them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import gguf
import numpy as np
import torch

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
}
"""Of transformers' families."""
SHIFTED = ("gemma", "gemma2", "gemma3")


def write(path: Path, folder: Path, model: torch.nn.Module, *, tensors_per_file: int = 0) -> None:
    """A checkpoint in F32; in several files if each is to have `tensors_per_file`."""
    config = model.config
    name = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, name, split_max_tensors=tensors_per_file)
    add_sizes(writer, model)
    add_rope(writer, config)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    add_byte_level(writer, tokenizer)
    names = gguf.get_tensor_name_map(_number(name), config.num_hidden_layers)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for key, tensor in model.state_dict().items():
        if key not in tied:
            stored = names.get_name(key, try_suffixes=(".weight", ".bias"))
            writer.add_tensor(stored, _stored(key, tensor, config, name).contiguous().numpy())
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_sizes(writer: gguf.GGUFWriter, model: torch.nn.Module) -> None:
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = model.model.layers[0].self_attn.head_dim
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.model_type != "qwen2" and getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "gemma3_text":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def add_rope(writer: gguf.GGUFWriter, config) -> None:
    """RoPE's base, and how it is scaled: Llama 3's and LongRoPE as factors for each frequency."""
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    match rope["rope_type"]:
        case "llama3":
            writer.add_tensor("rope_freqs.weight", np.array(llama3_factors(rope, head_dim), np.float32))
        case "longrope":
            writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
            stretched = config.max_position_embeddings / config.original_max_position_embeddings
            writer.add_rope_scaling_attn_factors(
                math.sqrt(1 + math.log(stretched) / math.log(config.original_max_position_embeddings))
            )
            for length in ("long", "short"):
                writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))
        case "yarn" | "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
            writer.add_rope_scaling_factor(rope["factor"])
            if rope["rope_type"] == "yarn":
                writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def llama3_factors(rope: dict, head_dim: int) -> list[float]:
    """What each frequency is divided by."""
    factors = []
    context, low, high = (rope[k] for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
    for i in range(0, head_dim, 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        smooth = min(max((context / wave - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors


def add_byte_level(writer: gguf.GGUFWriter, tokenizer: dict) -> None:
    """The tokenizer of `tests.checkpoints`, whose EOS is 2."""
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    ids = tokenizer["model"]["vocab"] | special
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(ids, key=ids.__getitem__))
    writer.add_token_types([3 if id in special.values() else 1 for id in range(len(ids))])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(2)


def _number(architecture: str) -> gguf.MODEL_ARCH:
    return next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)


def _stored(key: str, tensor: torch.Tensor, config, architecture: str) -> torch.Tensor:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(key.split(".")[-2])
    if architecture == "llama" and heads:
        return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
    return tensor + 1 if architecture in SHIFTED and key.endswith("norm.weight") else tensor
