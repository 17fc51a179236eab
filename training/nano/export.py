"""The trained model as a Hugging Face checkpoint of the `llama` architecture, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from training.nano.model import Model, Shape

NAMES = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def config_of(shape: Shape, bos: int, eos: int, pad: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.theta},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "dtype": str(dtype).removeprefix("torch."),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def export(model: Model, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json and model.safetensors beside the tokenizer's files, which must be there."""
    ids = json.loads((folder / "generation_config.json").read_text())
    config = config_of(model.shape, ids["bos_token_id"], ids["eos_token_id"], ids["pad_token_id"], dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tensors = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.last_norm}
    for own, name in NAMES.items():
        for i, weight in enumerate(getattr(model, own).unbind(0)):
            tensors[f"model.layers.{i}.{name}.weight"] = weight
    tensors = {name: weight.detach().to("cpu", dtype).contiguous() for name, weight in tensors.items()}
    file = folder / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)


@torch.no_grad()
def load(model: Model, folder: Path) -> None:
    """The weights of an exported checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    model.embedding.copy_(tensors["model.embed_tokens.weight"])
    model.last_norm.copy_(tensors["model.norm.weight"])
    for own, name in NAMES.items():
        for i, weight in enumerate(getattr(model, own)):
            weight.copy_(tensors[f"model.layers.{i}.{name}.weight"])
