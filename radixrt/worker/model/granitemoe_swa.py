"""Granite Swash with experts."""

from __future__ import annotations

from typing import Any

from radixrt.worker.model import granite
from radixrt.worker.model.granite_swa import windowed
from radixrt.worker.model.granitemoeshared import with_shared
from radixrt.worker.model.spec import ModelSpec


def spec(config: dict[str, Any]) -> ModelSpec:
    """And what they share, if anything is."""
    return with_shared(granite.spec(config | {"mlp_bias": False}, **windowed(config)), config)
