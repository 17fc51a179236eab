"""config.json and generation_config.json of a GGUF file."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from radixrt.checkpoint.gguf.file import GgufFile, StoredTensor
from radixrt.checkpoint.gguf.vocabulary import end_ids, named_ids

FIELDS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
"""Fields of config.json that every file must have -> the names of the values in metadata."""
LOCAL_BASE = 10_000.0
FLOAT32_TENSOR = 0
"""ggml's number of float32."""
LARGE_GEMMAS = {"gemma2": 46, "gemma3": 62}
"""Number of layers of the 27B models, which scale scores by hidden_size / num_attention_heads instead of head_dim."""


def model_config(file: GgufFile) -> dict[str, Any]:
    """What config.json says of the same model. ValueError names an architecture or a feature that is not served, or the
    value that is missing."""
    make = ARCHITECTURES.get(file.architecture)
    if make is None:
        raise ValueError(f"{file.path}: {not_served(file.architecture)}")
    if file.field("expert_count"):
        raise ValueError(f"{file.path}: models with experts are not served from GGUF")
    ids = {f"{name}_token_id": id for name, id in named_ids(file).items() if name in ("bos", "eos")}
    return _common(file) | ids | make(file)


def not_served(architecture: str) -> str:
    """What is said of an architecture that is none of ARCHITECTURES."""
    return f"architecture {architecture!r} is not served from GGUF; {', '.join(ARCHITECTURES)} are"


def generation_config(file: GgufFile) -> dict[str, Any]:
    return {"eos_token_id": end_ids(file)}


def _common(file: GgufFile) -> dict[str, Any]:
    config = {name: _needed(file, key) for name, key in FIELDS.items()}
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = _one(file, file.field("attention.head_count_kv", heads), "attention.head_count_kv")
    config["head_dim"] = head_dim = file.field("attention.key_length") or config["hidden_size"] // heads
    if file.field("attention.value_length", head_dim) != head_dim:
        raise ValueError(f"{file.path}: keys and values of different lengths are not served")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError(f"{file.path} has no matrix token_embd.weight")
    config |= {"vocab_size": embedding.shape[0], "tie_word_embeddings": "output.weight" not in file.tensors}
    return config | {"rope_theta": file.field("rope.freq_base", LOCAL_BASE)} | _rope_scaling(file)


def _needed(file: GgufFile, key: str) -> Any:
    value = _one(file, file.field(key), key)
    if value is None:
        raise ValueError(f"{file.path} has no {file.architecture}.{key}")
    return value


def _one(file: GgufFile, value: Any, key: str) -> Any:
    """A value that may be given by layer, if all layers have the same one."""
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise ValueError(f"{file.path}: {file.architecture}.{key} that differs by layer is not served")
    return value[0]


def _rope_scaling(file: GgufFile) -> dict[str, Any]:
    """`rope_scaling`. Llama 3.1's is stored as a factor for each frequency, as LongRoPE has them."""
    context, original = file.field("context_length"), file.field("rope.scaling.original_context_length")
    if one := file.tensors.get("rope_freqs.weight"):
        factors = dict.fromkeys(("short_factor", "long_factor"), _vector(one))
        rope = {"rope_type": "longrope", "original_max_position_embeddings": context, "attention_factor": 1.0}
        return {"rope_scaling": rope | factors}
    long, short = (file.tensors.get(f"rope_factors_{name}.weight") for name in ("long", "short"))
    if long and short:
        rope = {"rope_type": "longrope", "attention_factor": file.field("rope.scaling.attn_factor", 1.0)}
        rope |= {"short_factor": _vector(short), "long_factor": _vector(long)}
        return {"rope_scaling": rope, "original_max_position_embeddings": original or context}
    kind, factor = file.field("rope.scaling.type", "none"), file.field("rope.scaling.factor")
    if kind == "none" or not factor:
        return {}
    original = {"original_max_position_embeddings": original} if original else {}
    return {"rope_scaling": {"rope_type": kind, "factor": factor} | original}


def _vector(tensor: StoredTensor) -> list[float]:
    """A small tensor in float32."""
    count = tensor.shape[0]
    if len(tensor.shape) != 1 or tensor.kind != FLOAT32_TENSOR:
        raise ValueError(f"{tensor.path}: factors of RoPE are not a vector in F32")
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        return list(struct.unpack(f"<{count}f", file.read(4 * count)))


# ---------------------------------------------------------------- by architecture


def _llama(file: GgufFile) -> dict[str, Any]:
    """Llama, and all that compute as it does; Mistral if it has a sliding window."""
    window = file.field("attention.sliding_window")
    if window:
        return {"model_type": "mistral", "sliding_window": window}
    biases = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_gate.bias"}
    return {"model_type": "llama"} | {name: bias in file.tensors for name, bias in biases.items()}


def _qwen2(file: GgufFile) -> dict[str, Any]:
    return {"model_type": "qwen2", "use_sliding_window": False}


def _qwen3(file: GgufFile) -> dict[str, Any]:
    return {"model_type": "qwen3", "use_sliding_window": False}


def _phi3(file: GgufFile) -> dict[str, Any]:
    head_dim = file.field("embedding_length") // file.field("attention.head_count")
    rotated = file.field("rope.dimension_count", head_dim)
    window = file.field("attention.sliding_window") or None
    return {"model_type": "phi3", "sliding_window": window, "partial_rotary_factor": rotated / head_dim}


def _gemma(file: GgufFile) -> dict[str, Any]:
    return {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"}


def _gemma2(file: GgufFile) -> dict[str, Any]:
    caps = {f"{name}_logit_softcapping": file.field(f"{name}_logit_softcapping") for name in ("attn", "final")}
    given = {name: value for name, value in caps.items() if value}
    window = {"sliding_window": file.field("attention.sliding_window", 4096)}
    return {"model_type": "gemma2", "query_pre_attn_scalar": _gemma_scalar(file)} | window | given


def _gemma3(file: GgufFile) -> dict[str, Any]:
    config = {"model_type": "gemma3_text", "query_pre_attn_scalar": _gemma_scalar(file)}
    config["rope_local_base_freq"] = file.field("rope.freq_base_swa", LOCAL_BASE)
    if cap := file.field("final_logit_softcapping"):
        config["final_logit_softcapping"] = cap
    layers, window = file.field("block_count"), file.field("attention.sliding_window")
    pattern = file.field("attention.sliding_window_pattern", 6)
    if not window:
        pattern = [False] * layers
    if isinstance(pattern, list):
        config["layer_types"] = [("full", "sliding")[bool(slides)] + "_attention" for slides in pattern]
        return config | ({"sliding_window": window} if window else {})
    return config | {"sliding_window": window, "sliding_window_pattern": pattern}


def _gemma_scalar(file: GgufFile) -> int:
    width: int = file.field("embedding_length") // file.field("attention.head_count")
    large = file.field("block_count") == LARGE_GEMMAS[file.architecture]
    return width if large else file.field("attention.key_length", width)


ARCHITECTURES: dict[str, Callable[[GgufFile], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
}
