"""Models: `families` says what each is, `decoder` computes them, and `transformers_model` those without a file."""

from __future__ import annotations

import importlib
from typing import Any

from radixrt.checkpoint.files import FAMILIES, not_served
from radixrt.worker.model.layers.rope import frequencies
from radixrt.worker.model.spec.spec import ModelSpec
from radixrt.worker.model.weights.quantized import check_quantization


def read_spec(config: dict[str, Any], longest: int = 0) -> ModelSpec:
    """The spec of a parsed `config.json`, for contexts of up to `longest` tokens (0: the model's own limit). ValueError
    names what is not served, or the field that is missing, or the model's limit if that is shorter."""
    family = config.get("model_type", "")
    if family not in FAMILIES:
        raise ValueError(not_served(family))
    check_quantization(config)
    try:
        spec: ModelSpec = importlib.import_module(f"{__name__}.families.{family}").spec(config)
    except KeyError as missing:
        raise ValueError(f"config.json has no {missing.args[0]}") from None
    if longest:
        spec = spec.shortened(longest)
    for rope in spec.ropes:  # raises if not served, before gigabytes of weights are read
        frequencies(rope, spec.rope_dim, spec.max_model_len)
    return spec
