"""Gemma 3 of 4b and more: the part of it that is for text."""

from __future__ import annotations

from typing import Any

from radixrt.worker.model import gemma3_text
from radixrt.worker.model.spec import ModelSpec, text_part


def spec(config: dict[str, Any]) -> ModelSpec:
    """Of its `text_config`."""
    return gemma3_text.spec(text_part({"tie_word_embeddings": True} | config))
