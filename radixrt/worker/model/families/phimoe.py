"""Phi-3.5-MoE: LayerNorms, biases of attention and of the output projection, experts selected by SparseMixer."""

from typing import Any

from radixrt.worker.model.families.starcoder2 import NORMS
from radixrt.worker.model.spec.expert_spec import ExpertsSpec, Routing
from radixrt.worker.model.spec.fields import common, with_experts
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS: dict[str, Any] = {"intermediate_size": 6400, "num_key_value_heads": 8, "max_position_embeddings": 131_072}
DEFAULTS |= {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 16, "num_experts_per_tok": 2}
DEFAULTS |= {"router_jitter_noise": 0.01}
OTHER_NAMES = ((".mlp.", ".block_sparse_moe."), (".router.", ".gate."))


def spec(config: dict[str, Any]) -> ModelSpec:
    """Every layer has the window `sliding_window`, or none if that is null."""
    config = DEFAULTS | config
    layers = config["num_hidden_layers"]
    if config["num_experts_per_tok"] != 2:
        raise ValueError(f"num_experts_per_tok {config['num_experts_per_tok']} is not served; 2 is")
    plain = common(
        config,
        windows=(config.get("sliding_window"),) * layers,
        norms=NORMS,
        attention_bias=True,
        other_names=OTHER_NAMES,
    )
    experts = ExpertsSpec(
        count=config["num_local_experts"],
        top_k=2,
        intermediate_size=config["intermediate_size"],
        normalized=False,
        layers=frozenset(range(layers)),
        names=("w1", "w3", "w2"),
        router="router",
        routing=Routing(jitter=config["router_jitter_noise"]),
    )
    return with_experts(plain, experts)
