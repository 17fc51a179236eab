"""Granite 3: Llama with multipliers of embeddings, softmax scale, residuals and logits."""

from typing import Any

from radixrt.worker.model.families import llama
from radixrt.worker.model.spec.spec import ModelSpec, with_features


def spec(config: dict[str, Any], **features: Any) -> ModelSpec:
    """`features`: other fields of ModelSpec, for derived families."""
    return with_features(
        llama.spec(config, **features),
        embedding_factor=config.get("embedding_multiplier", 1.0),
        scale_override=config.get("attention_multiplier", 1.0),
        residual_factor=config.get("residual_multiplier", 1.0),
        logits_factor=1 / config.get("logits_scaling", 1.0),
    )
