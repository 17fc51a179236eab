"""Hunyuan, dense, 0.5b to 7b: Llama whose heads are normalized after they are rotated."""

from __future__ import annotations

from typing import Any

from radixrt.worker.model import llama
from radixrt.worker.model.spec import ModelSpec, check_served, rope_parameters

SERVED = {"use_qk_norm": True, "use_cla": False, "mlp_bias": False}
"""Of fields that a file may have: what the models that there are say."""


def spec(config: dict[str, Any]) -> ModelSpec:
    """`alpha` of the scaling `dynamic` makes another base of it, whatever the length of a sequence."""
    check_served(config, SERVED)
    config = {"rms_norm_eps": 1e-5} | config
    rope = rope_parameters(config)
    if rope["rope_type"] == "dynamic" and rope.get("alpha"):
        dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        theta = rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2))
        config |= {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    names = "query_layernorm", "key_layernorm"
    return llama.spec(config, qk_norm=True, qk_norm_last=True, qk_norms=names)
