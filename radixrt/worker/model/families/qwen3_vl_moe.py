"""Qwen3-VL with experts: only its language model."""

import dataclasses
from typing import Any

from radixrt.worker.model.families import qwen3_moe, qwen3_vl
from radixrt.worker.model.spec.fields import text_config
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = qwen3_vl.DEFAULTS | {"num_key_value_heads": 16, "num_experts_per_tok": 4, "num_local_experts": 60}
DEFAULTS |= {"moe_intermediate_size": 1408}


def spec(config: dict[str, Any]) -> ModelSpec:
    """As Qwen3-VL. `norm_topk_prob` is true, whatever config.json says."""
    fixed = {"use_sliding_window": False, "norm_topk_prob": True}
    plain = qwen3_moe.spec(DEFAULTS | text_config(config) | fixed)
    assert plain.experts is not None
    return dataclasses.replace(plain, experts=dataclasses.replace(plain.experts, maybe_transposed=True))
