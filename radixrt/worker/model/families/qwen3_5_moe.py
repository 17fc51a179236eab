"""Qwen3.5 with experts, multimodal: only its language model."""

from typing import Any

from radixrt.worker.model.families import qwen3_5_moe_text
from radixrt.worker.model.spec.fields import text_config
from radixrt.worker.model.spec.spec import ModelSpec


def spec(config: dict[str, Any]) -> ModelSpec:
    return qwen3_5_moe_text.spec(text_config(config))
