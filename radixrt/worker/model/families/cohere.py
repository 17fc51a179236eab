"""Command R and Aya: parallel attention and MLP behind one LayerNorm; interleaved RoPE."""

from typing import Any

from radixrt.worker.model.spec.fields import common
from radixrt.worker.model.spec.norms_spec import NormsSpec
from radixrt.worker.model.spec.spec import HeadNormsSpec, ModelSpec

NORMS = NormsSpec(before_mlp="input_layernorm", float32_weight=True, centered=True)
HEAD_NORMS = HeadNormsSpec(("q_norm", "k_norm"), per_head=True)
"""Of Command R+."""
DEFAULTS = {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True, "rope_theta": 5e5}


def spec(config: dict[str, Any], **features: Any) -> ModelSpec:
    """`features`: other fields of ModelSpec, for derived families."""
    config = DEFAULTS | config
    return common(
        config | {"rms_norm_eps": config["layer_norm_eps"]},
        parallel=True,
        interleaved=True,
        attention_bias=True,
        logits_factor=config["logit_scale"],
        head_norms=HEAD_NORMS if config.get("use_qk_norm") else None,
        **{"norms": NORMS} | features,
    )
