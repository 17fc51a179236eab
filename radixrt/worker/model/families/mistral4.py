"""Mistral Small 4: latent attention with queries that are scaled by position, experts selected by softmax."""

import dataclasses
from typing import Any

from radixrt.worker.model.families.deepseek_v2 import latent_decoder, with_routed_experts
from radixrt.worker.model.families.ministral3 import YARN, with_query_scaling
from radixrt.worker.model.spec.expert_spec import Routing
from radixrt.worker.model.spec.fields import check_served
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS: dict[str, Any] = {"q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64}
DEFAULTS |= {"v_head_dim": 128, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 4}
DEFAULTS |= {"moe_intermediate_size": 2048, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
DEFAULTS |= {"rope_interleave": True, "max_position_embeddings": 1_048_576}
ROPE = YARN | {"rope_theta": 10_000.0, "factor": 128.0, "original_max_position_embeddings": 8192}


def spec(config: dict[str, Any]) -> ModelSpec:
    """`partial_rotary_factor` is ignored: it only says that `qk_rope_head_dim` is a part of a head.

    The softmax scale has no factor by `mscale_all_dim`, unlike DeepSeek's: the release's params.json has `apply_scale:
    false` for its RoPE, and answers are worse with the factor (sgl-project/sglang#26203; vLLM omits it, too).
    transformers 5.23 applies it."""
    config = DEFAULTS | config
    check_served(config, {"n_group": 1, "topk_group": 1})
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        config["rope_parameters"] = ROPE
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name) or {}
        config[name] = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
    plain = with_query_scaling(latent_decoder(config, interleaved=bool(config["rope_interleave"])))
    assert plain.latent is not None
    scale = (plain.latent.nope_dim + plain.latent.rope_dim) ** -0.5
    plain = dataclasses.replace(plain, latent=dataclasses.replace(plain.latent, scale=scale))
    routing = Routing(factor=config["routed_scaling_factor"])
    return with_routed_experts(plain, config, routing, bool(config["norm_topk_prob"]))
