"""Granite Swash with experts."""

from typing import Any

from radixrt.worker.model.families import granite
from radixrt.worker.model.families.granite_swa import layer_features
from radixrt.worker.model.families.granitemoeshared import with_shared
from radixrt.worker.model.spec.spec import ModelSpec


def spec(config: dict[str, Any]) -> ModelSpec:
    """With a shared expert if `shared_intermediate_size` is not 0."""
    return with_shared(granite.spec(config | {"mlp_bias": False}, **layer_features(config)), config)
