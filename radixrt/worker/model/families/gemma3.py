"""Gemma 3, 4b and larger: only its language model."""

from typing import Any

from radixrt.worker.model.families import gemma3_text
from radixrt.worker.model.spec.fields import text_config
from radixrt.worker.model.spec.spec import ModelSpec


def spec(config: dict[str, Any]) -> ModelSpec:
    """Reads `text_config`."""
    return gemma3_text.spec(text_config({"tie_word_embeddings": True} | config))
