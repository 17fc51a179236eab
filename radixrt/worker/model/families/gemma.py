"""Gemma (of 2024), 2b and 7b, and CodeGemma: Llama with GELU, norms of 1 + weight, and scaled embeddings."""

from typing import Any

from radixrt.worker.model.spec.fields import common
from radixrt.worker.model.spec.norms_spec import NormsSpec
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = {"head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True}
DEFAULTS |= {"num_key_value_heads": 16}


def spec(config: dict[str, Any]) -> ModelSpec:
    """The activation is GELU by tanh, also where files say `gelu` or nothing. Embeddings are multiplied by
    hidden_size^0.5."""
    check_causal(config)
    config = DEFAULTS | config
    if config.get("hidden_act", "gelu") == "gelu":
        config["hidden_act"] = "gelu_pytorch_tanh"
    return common(
        config,
        attention_bias=True,
        norms=NormsSpec(float32_weight=True, offset=1.0),
        embedding_factor=config["hidden_size"] ** 0.5,
    )


def check_causal(config: dict[str, Any]) -> None:
    """ValueError if tokens also attend to those after them."""
    if config.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention is not served")
