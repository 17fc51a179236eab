"""FlexOlmo: OLMo 2 with experts in every layer."""

from __future__ import annotations

from typing import Any

from radixrt.worker.model import olmo2
from radixrt.worker.model.olmoe import all_experts
from radixrt.worker.model.spec import ModelSpec, with_experts

DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 5e5}
"""Of transformers, in place of what a file leaves out."""


def spec(config: dict[str, Any]) -> ModelSpec:
    """What a layer's experts make together is normalized, as what an MLP makes."""
    config = DEFAULTS | config
    return with_experts(olmo2.spec(config), all_experts(config, count=7, chosen=5))
