"""Llama 2, 3, 3.1, 3.2, 3.3 and models of the same architecture."""

from typing import Any

from radixrt.worker.model.spec.fields import common
from radixrt.worker.model.spec.spec import ModelSpec


def spec(config: dict[str, Any], **features: Any) -> ModelSpec:
    """`features`: other fields of ModelSpec, for derived families."""
    return common(config, attention_bias=True, mlp_bias=bool(config.get("mlp_bias")), **features)
