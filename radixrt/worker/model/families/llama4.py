"""Llama 4: only its language model."""

from typing import Any

from radixrt.worker.model.families import llama4_text
from radixrt.worker.model.spec.fields import text_config
from radixrt.worker.model.spec.spec import ModelSpec


def spec(config: dict[str, Any]) -> ModelSpec:
    """Reads `text_config`."""
    return llama4_text.spec(text_config(config))
