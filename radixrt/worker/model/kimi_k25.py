"""Kimi K2.5 and K2.6: the part of them that is for text, which is Kimi K2."""

from __future__ import annotations

from typing import Any

from radixrt.worker.model import kimi_k2
from radixrt.worker.model.spec import ModelSpec, text_part


def spec(config: dict[str, Any]) -> ModelSpec:
    """Of its `text_config`."""
    return kimi_k2.spec(text_part({"tie_word_embeddings": True} | config))
