"""Model families, one file each, named as the checkpoint's `model_type`.

A family says in `spec(config)` how its `config.json` reads as a `ModelSpec`; `decoder` computes any of them.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from radixrt.worker.model.quantized import check_quantization
from radixrt.worker.model.rope import frequencies
from radixrt.worker.model.spec import ModelSpec

FAMILIES = (
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "exaone4",
    "gemma3",
    "gemma3_text",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "granite",
    "iquestcoder",
    "kimi_k2",
    "kimi_k25",
    "llama",
    "minimax_m2",
    "ministral3",
    "mistral",
    "mistral3",
    "mistral4",
    "mixtral",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3",
    "qwen3_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "seed_oss",
    "smollm3",
    "solar_open",
)
"""Every `model_type` that can be served."""


def read_spec(config: dict[str, Any], longest: int = 0) -> ModelSpec:
    """The spec of a parsed `config.json`, for contexts of up to `longest` tokens (0: as many as the model is made for).
    ValueError names what of it is not served."""
    family = config.get("model_type", "")
    if family not in FAMILIES:
        raise ValueError(f"model_type {family!r} is not served; {', '.join(FAMILIES)} are")
    check_quantization(config)
    try:
        spec: ModelSpec = importlib.import_module(f"{__name__}.{family}").spec(config)
    except KeyError as missing:
        raise ValueError(f"config.json has no {missing.args[0]}") from None
    if 0 < longest < spec.max_model_len:
        spec = dataclasses.replace(spec, max_model_len=longest)
    for rope in spec.ropes:  # says what is not served before gigabytes are read
        frequencies(rope, spec.rope_dim, spec.max_model_len)
    return spec
