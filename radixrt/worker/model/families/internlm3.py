"""InternLM 3: Llama with other names of fields."""

from typing import Any

from radixrt.worker.model.families import llama
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 32_768}


def spec(config: dict[str, Any]) -> ModelSpec:
    """`qkv_bias` and `bias` are Llama's `attention_bias` and `mlp_bias`. ValueError if they differ, since `bias` is
    also that of attention's output."""
    config = DEFAULTS | config
    heads = bool(config.get("attention_bias", config.get("qkv_bias")))
    others = bool(config.get("mlp_bias", config.get("bias")))
    if heads != others:
        raise ValueError(f"qkv_bias {heads} with bias {others} is not served; the same for both is")
    return llama.spec(config | {"attention_bias": heads, "mlp_bias": others})
