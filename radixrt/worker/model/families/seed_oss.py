"""Seed-OSS."""

from typing import Any

from radixrt.worker.model.spec.fields import common
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = {"head_dim": 128, "num_key_value_heads": 8, "attention_bias": True}


def spec(config: dict[str, Any]) -> ModelSpec:
    """`attention_bias` is for q, k and v, `attention_out_bias` for the output."""
    config = DEFAULTS | config
    return common(
        config,
        qkv_bias=bool(config["attention_bias"]),
        output_bias=bool(config.get("attention_out_bias")),
        mlp_bias=bool(config.get("mlp_bias")),
    )
