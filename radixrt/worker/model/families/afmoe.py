"""Arcee's Trinity: gated attention, sliding windows, experts selected by sigmoid."""

from typing import Any

from radixrt.worker.model.spec.expert_spec import ExpertsSpec, Routing
from radixrt.worker.model.spec.fields import (
    check_served,
    common,
    layer_kinds,
    layer_windows,
    rope_parameters,
    with_experts,
)
from radixrt.worker.model.spec.norms_spec import NormsSpec
from radixrt.worker.model.spec.spec import GateSpec, ModelSpec

NORMS = NormsSpec(
    after_attention="post_attention_layernorm",
    before_mlp="pre_mlp_layernorm",
    after_mlp="post_mlp_layernorm",
    float32_weight=True,
)
DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1e-5, "global_attn_every_n_layers": 4, "sliding_window": 1024}
DEFAULTS |= {"num_experts": 64, "num_experts_per_tok": 6, "num_shared_experts": 2, "moe_intermediate_size": 1408}
DEFAULTS |= {"num_dense_layers": 1, "route_scale": 1.0, "max_position_embeddings": 16_384}
SERVED = {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}


def spec(config: dict[str, Any]) -> ModelSpec:
    """Without `layer_types`, every `global_attn_every_n_layers`-th layer has full attention. Only layers with windows
    have RoPE. With `mup_enabled`, embeddings are multiplied by hidden_size^0.5."""
    check_served(config, SERVED)
    config = DEFAULTS | config
    kinds, rope = layer_kinds(config, config["global_attn_every_n_layers"]), rope_parameters(config)
    inner = config["moe_intermediate_size"]
    plain = common(
        config,
        norms=NORMS,
        qk_norm=True,
        attention_bias=True,
        gate=GateSpec("gate_proj"),
        windows=layer_windows(config | {"layer_types": kinds}),
        layer_ropes=tuple(rope if kind == "sliding_attention" else None for kind in kinds),
        embedding_factor=config["hidden_size"] ** 0.5 if config.get("mup_enabled") else 1.0,
    )
    experts = ExpertsSpec(
        count=config["num_experts"],
        top_k=config["num_experts_per_tok"],
        intermediate_size=inner,
        normalized=True,
        layers=frozenset(range(config["num_dense_layers"], config["num_hidden_layers"])),
        router="router.gate",
        bias=("expert_bias",),
        routing=Routing(sigmoid=True, factor=config["route_scale"]),
        shared_size=inner * config["num_shared_experts"],
    )
    return with_experts(plain, experts)
