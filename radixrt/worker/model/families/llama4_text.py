"""Llama 4, Scout and Maverick: layers with RoPE attend within chunks, with norms of q and k; the others attend to all
tokens, more sharply the more there are. Experts get inputs that are scaled by the router's sigmoid."""

from typing import Any

from radixrt.worker.model.spec.expert_spec import ExpertsSpec, Routing
from radixrt.worker.model.spec.fields import common, rope_parameters, with_experts
from radixrt.worker.model.spec.spec import HeadNormsSpec, ModelSpec, QueryScaling

DEFAULTS: dict[str, Any] = {"intermediate_size": 8192, "intermediate_size_mlp": 16_384, "num_key_value_heads": 8}
DEFAULTS |= {"head_dim": 128, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 5e5}
DEFAULTS |= {"num_experts_per_tok": 1, "num_local_experts": 16, "interleave_moe_layer_step": 1, "use_qk_norm": True}
DEFAULTS |= {"no_rope_layer_interval": 4, "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1}
NORMS = HeadNormsSpec((), centered=False, after_rope=True, only_with_rope=True)
OTHER_NAMES = ((".mlp.", ".feed_forward."),)


def spec(config: dict[str, Any]) -> ModelSpec:
    """Without `no_rope_layers` (1: RoPE, 0: none), every `no_rope_layer_interval`-th layer has no RoPE; without
    `moe_layers`, every `interleave_moe_layer_step`-th one has experts. `attention_chunk_size` null: there are no
    chunks."""
    config = DEFAULTS | {"attention_chunk_size": 8192} | config
    layers = range(config["num_hidden_layers"])
    roped = config.get("no_rope_layers") or [(i + 1) % config["no_rope_layer_interval"] for i in layers]
    chunk, rope = config["attention_chunk_size"], rope_parameters(config)
    kinds = config.get("layer_types") or [("full", "chunked")[bool(one) and chunk is not None] for one in roped]
    scaling = QueryScaling(config["attn_scale"], config["floor_scale"], ahead=1, only_without_rope=True)
    plain = common(
        config | {"intermediate_size": config["intermediate_size_mlp"]},
        windows=tuple(chunk if kind.startswith("chunked") else None for kind in kinds),
        chunked=True,
        interleaved=True,
        layer_ropes=tuple(rope if roped[i] else None for i in layers),
        head_norms=NORMS if config["use_qk_norm"] else None,
        query_scaling=scaling if config["attn_temperature_tuning"] else None,
        attention_bias=True,
        other_names=OTHER_NAMES,
    )
    step = config["interleave_moe_layer_step"]
    sparse = config.get("moe_layers")
    experts = ExpertsSpec(
        count=config["num_local_experts"],
        top_k=config["num_experts_per_tok"],
        intermediate_size=config["intermediate_size"],
        normalized=False,
        layers=frozenset(layers[step - 1 :: step] if sparse is None else sparse),
        router="router",
        routing=Routing(sigmoid=True, unbiased=True, scales_inputs=True, min_weight_sum=1e-20),
        shared_size=config["intermediate_size"],
        shared="shared_expert",
        maybe_transposed=True,
    )
    return with_experts(plain, experts) if experts.layers else plain
