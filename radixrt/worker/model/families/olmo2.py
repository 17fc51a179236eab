"""OLMo 2: norms after attention and MLP instead of before; one norm over all heads of q, and of k."""

from typing import Any

from radixrt.worker.model.spec.fields import common
from radixrt.worker.model.spec.norms_spec import NormsSpec
from radixrt.worker.model.spec.spec import ModelSpec

NORMS = NormsSpec(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
    float32_weight=True,
)


def spec(config: dict[str, Any], **features: Any) -> ModelSpec:
    """`features`: other fields of ModelSpec, for derived families."""
    config = {"rms_norm_eps": 1e-5} | config
    return common(config, qk_norm_all_heads=True, norms=NORMS, attention_bias=True, **features)
