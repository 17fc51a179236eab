"""North Mini: Command A with experts."""

from typing import Any

from radixrt.worker.model.families import cohere, cohere2
from radixrt.worker.model.spec.expert_spec import ExpertsSpec, Routing
from radixrt.worker.model.spec.fields import check_served, moe_layers, with_experts
from radixrt.worker.model.spec.norms_spec import NormsSpec
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS: dict[str, Any] = {"head_dim": 128, "num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 0}
DEFAULTS |= {"norm_topk_prob": True, "expert_selection_fn": "softmax", "layer_norm_eps": 1e-5}
DEFAULTS |= {"shared_expert_combination_strategy": "average", "prefix_dense_sliding_window_pattern": 1}
DEFAULTS |= {"max_position_embeddings": 8192}
SERVED = {"use_parallel_block": True, "use_gated_activation": True, "rotary_pct": 1.0, "rope_scaling": None}
"""The only values of these fields that are served: those of the published models. (transformers ignores
`rope_scaling`.)"""
RMS_NORMS = NormsSpec(before_mlp="input_layernorm")


def spec(config: dict[str, Any]) -> ModelSpec:
    """`intermediate_size` is that of an expert; layers without experts have `prefix_dense_intermediate_size`. The
    latter all have RoPE if `prefix_dense_sliding_window_pattern` is 1, otherwise only those with a window. With
    `rms_norm_eps`, norms are RMSNorms."""
    check_served(config, SERVED)
    config = cohere2.DEFAULTS | DEFAULTS | config
    first, layers = config.get("first_k_dense_replace") or 0, config["num_hidden_layers"]
    alone, inner = config["prefix_dense_sliding_window_pattern"], config["intermediate_size"]
    if not config.get("layer_types"):
        every = [alone] * first + [config["sliding_window_pattern"]] * layers
        numbers = [*range(first), *range(layers - first)]
        kinds = [("sliding", "full")[(i + 1) % n == 0] for i, n in zip(numbers, every, strict=False)]
        config["layer_types"] = [f"{kind}_attention" for kind in kinds]
    sparse = moe_layers(config, first)
    rope_layers = frozenset(range(layers)) - sparse if alone == 1 else frozenset()
    rms = config.get("rms_norm_eps") is not None
    config["layer_norm_eps"] = config["rms_norm_eps"] if rms else config["layer_norm_eps"]
    config["intermediate_size"] = config.get("prefix_dense_intermediate_size") or inner
    plain = cohere2.with_windows(config, rope_layers, norms=RMS_NORMS if rms else cohere.NORMS)
    chosen_by, together = config["expert_selection_fn"], config["shared_expert_combination_strategy"]
    if chosen_by not in ("softmax", "sigmoid") or together not in ("average", "sum"):
        raise ValueError(f"expert_selection_fn {chosen_by!r} with {together!r} is not served")
    sigmoid, shared = chosen_by == "sigmoid", inner * config["num_shared_experts"]
    experts = ExpertsSpec(
        count=config["num_experts"],
        top_k=config["num_experts_per_tok"],
        intermediate_size=inner,
        normalized=not sigmoid or bool(config["norm_topk_prob"]),
        layers=sparse,
        routing=Routing(sigmoid=sigmoid, unbiased=True),
        shared_size=shared,
        factor=0.5 if shared and together == "average" else 1.0,
    )
    return with_experts(plain, experts)
