"""EXAONE 4.5: only its language model, which is EXAONE 4."""

from typing import Any

from radixrt.worker.model.families import exaone4
from radixrt.worker.model.spec.fields import text_config
from radixrt.worker.model.spec.spec import ModelSpec


def spec(config: dict[str, Any]) -> ModelSpec:
    """Reads `text_config`."""
    return exaone4.spec(text_config(config))
