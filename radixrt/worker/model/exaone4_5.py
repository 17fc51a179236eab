"""EXAONE 4.5: the part of it that is for text, which is EXAONE 4."""

from __future__ import annotations

from typing import Any

from radixrt.worker.model import exaone4
from radixrt.worker.model.spec import ModelSpec, text_part


def spec(config: dict[str, Any]) -> ModelSpec:
    """Of its `text_config`."""
    return exaone4.spec(text_part(config))
