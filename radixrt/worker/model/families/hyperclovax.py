"""HyperCLOVA X SEED: Granite with additional norms after attention and MLP."""

from typing import Any

from radixrt.worker.model.families import granite
from radixrt.worker.model.spec.fields import check_served
from radixrt.worker.model.spec.norms_spec import NormsSpec
from radixrt.worker.model.spec.spec import ModelSpec, with_features

NORMS = NormsSpec(after_attention="post_norm1", after_mlp="post_norm2")


def spec(config: dict[str, Any]) -> ModelSpec:
    """Logits are multiplied by `logits_scaling`, which Granite divides by. With norms after attention and MLP
    (`use_post_norm`), no other `residual_multiplier` than 1 is served."""
    normed = bool(config.get("use_post_norm", True))
    if normed:
        check_served(config, {"residual_multiplier": 1.0})
    plain = granite.spec(config, norms=NORMS if normed else NormsSpec())
    return with_features(
        plain,
        scale_override=config.get("attention_multiplier") or plain.head_dim**-0.5,
        logits_factor=config.get("logits_scaling", 1.0),
    )
