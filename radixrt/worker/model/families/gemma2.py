"""Gemma 2: norms before and after attention and MLP; soft-capped scores and logits; sliding windows in every second
layer."""

from typing import Any

from radixrt.worker.model.families.gemma import check_causal
from radixrt.worker.model.families.gemma3_text import NORMS
from radixrt.worker.model.spec.fields import common, layer_windows
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS: dict[str, Any] = {"head_dim": 256, "num_key_value_heads": 4, "max_position_embeddings": 8192}
DEFAULTS |= {"sliding_window": 4096, "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh"}
DEFAULTS |= {"tie_word_embeddings": True, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


def spec(config: dict[str, Any]) -> ModelSpec:
    """Without `layer_types`, layers 0, 2, 4, ... have a window. Embeddings are multiplied by hidden_size^0.5; the
    softmax scale is query_pre_attn_scalar^-0.5."""
    check_causal(config)
    config = DEFAULTS | config
    if not config.get("layer_types"):
        kinds = "sliding_attention", "full_attention"
        config["layer_types"] = [kinds[i % 2] for i in range(config["num_hidden_layers"])]
    return common(
        config | {"hidden_act": config["hidden_activation"]},
        windows=layer_windows(config),
        attention_bias=True,
        norms=NORMS,
        scale_override=config["query_pre_attn_scalar"] ** -0.5,
        embedding_factor=config["hidden_size"] ** 0.5,
        score_cap=config["attn_logit_softcapping"],
        logits_cap=config["final_logit_softcapping"],
    )
