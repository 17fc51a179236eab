"""Kimi K2.5 and K2.6: only their language model, which is Kimi K2."""

from typing import Any

from radixrt.worker.model.families import kimi_k2
from radixrt.worker.model.spec.fields import text_config
from radixrt.worker.model.spec.spec import ModelSpec


def spec(config: dict[str, Any]) -> ModelSpec:
    """Reads `text_config`."""
    return kimi_k2.spec(text_config({"tie_word_embeddings": True} | config))
