"""Qwen3.5, dense: as Qwen3-Next without experts."""

from typing import Any

from radixrt.worker.model.families import qwen3_next
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = qwen3_next.DEFAULTS | {"num_key_value_heads": 4}


def spec(config: dict[str, Any]) -> ModelSpec:
    """For text, the three positions of M-RoPE are the same, which makes it RoPE."""
    return qwen3_next.hybrid(DEFAULTS | config)
