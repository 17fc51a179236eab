"""Granite 3: Llama with factors."""

from __future__ import annotations

import dataclasses
from typing import Any

from radixrt.worker.model import llama
from radixrt.worker.model.spec import ModelSpec


def spec(config: dict[str, Any], **features: Any) -> ModelSpec:
    """Of embeddings, of the softmax, of what goes to the residual stream; logits are divided by theirs. `features`
    are a successor's."""
    return dataclasses.replace(
        llama.spec(config, **features),
        embedding_factor=config.get("embedding_multiplier", 1.0),
        stated_scale=config.get("attention_multiplier", 1.0),
        residual_factor=config.get("residual_multiplier", 1.0),
        logits_factor=1 / config.get("logits_scaling", 1.0),
    )
