"""Hunyuan, dense, 0.5b to 7b: Llama with norms of q and k after RoPE."""

from typing import Any

from radixrt.worker.model.families import llama
from radixrt.worker.model.spec.fields import check_served, rope_parameters
from radixrt.worker.model.spec.spec import HeadNormsSpec, ModelSpec

SERVED = {"use_qk_norm": True, "use_cla": False, "mlp_bias": False}
HEAD_NORMS = HeadNormsSpec(("query_layernorm", "key_layernorm"), centered=False, after_rope=True)


def spec(config: dict[str, Any]) -> ModelSpec:
    """`dynamic` RoPE with `alpha` has the base theta * alpha^(d / (d - 2)), whatever the length of a sequence."""
    check_served(config, SERVED)
    config = {"rms_norm_eps": 1e-5} | config
    rope = rope_parameters(config)
    if rope["rope_type"] == "dynamic" and rope.get("alpha"):
        dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        theta = rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2))
        config |= {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    return llama.spec(config, head_norms=HEAD_NORMS)
