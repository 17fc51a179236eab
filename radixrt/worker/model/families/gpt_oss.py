"""gpt-oss 20b and 120b: attention sinks, sliding windows, experts with biases and a clamped SwiGLU."""

import dataclasses
from typing import Any

from radixrt.worker.model.spec.expert_spec import ExpertsSpec
from radixrt.worker.model.spec.fields import common, layer_windows, with_experts
from radixrt.worker.model.spec.spec import CLAMPED_SWIGLU, ModelSpec

YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
DEFAULTS = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "max_position_embeddings": 131_072,
}


def spec(config: dict[str, Any]) -> ModelSpec:
    """Without `layer_types`, layers 0, 2, 4, ... have a window. ValueError for other parameters of SwiGLU than those of
    the published models."""
    config = DEFAULTS | config
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        config["rope_scaling"] = dict(YARN)
    layers = config["num_hidden_layers"]
    if not config.get("layer_types"):
        config["layer_types"] = [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]
    limits = config.get("swiglu_limit", CLAMPED_SWIGLU[0]), config.get("swiglu_alpha", CLAMPED_SWIGLU[1])
    if limits != CLAMPED_SWIGLU:
        raise ValueError(f"swiglu_limit and swiglu_alpha {limits} are not served; {CLAMPED_SWIGLU} are")
    biased = bool(config.get("attention_bias", True))
    plain = common(config, windows=layer_windows(config), qkv_bias=biased, output_bias=biased, sinks=True)
    experts = ExpertsSpec(
        count=config.get("num_local_experts") or config.get("num_experts", 128),
        top_k=config.get("num_experts_per_tok") or config.get("experts_per_token", 4),
        intermediate_size=config["intermediate_size"],
        normalized=True,
        layers=frozenset(range(layers)),
        names=(),
        interleaved_gate_up=True,
    )
    return dataclasses.replace(with_experts(plain, experts), activation="clamped_swiglu")
