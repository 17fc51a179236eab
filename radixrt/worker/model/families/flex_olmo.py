"""FlexOlmo: OLMo 2 with experts in every layer."""

from typing import Any

from radixrt.worker.model.families import olmo2
from radixrt.worker.model.families.olmoe import experts_spec
from radixrt.worker.model.spec.fields import with_experts
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 5e5}


def spec(config: dict[str, Any]) -> ModelSpec:
    """The norm after the MLP applies to the sum of the experts."""
    config = DEFAULTS | config
    return with_experts(olmo2.spec(config), experts_spec(config, count=7, top_k=5))
