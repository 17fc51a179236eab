"""Qwen3.5, dense and multimodal: only its language model."""

from typing import Any

from radixrt.worker.model.families import qwen3_5_text
from radixrt.worker.model.spec.fields import text_config
from radixrt.worker.model.spec.spec import ModelSpec


def spec(config: dict[str, Any]) -> ModelSpec:
    return qwen3_5_text.spec(text_config(config))
