"""DeepSeek V2, V2 Lite and V2.5: latent attention, experts selected by softmax."""

from typing import Any

from radixrt.worker.model.layers.rope import yarn_mscale
from radixrt.worker.model.spec.expert_spec import ExpertsSpec, Routing
from radixrt.worker.model.spec.fields import common, rope_parameters, with_experts
from radixrt.worker.model.spec.spec import LatentSpec, ModelSpec

DEFAULTS = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
DEFAULTS |= {"v_head_dim": 128}
"""Defaults of transformers for fields that config.json lacks; `q_lora_rank` may be null."""
METHODS = ("greedy", "group_limited_greedy")


def spec(config: dict[str, Any]) -> ModelSpec:
    """`topk_method` says how experts are selected. With `norm_topk_prob`, `routed_scaling_factor` is ignored, as in
    DeepSeek's own code."""
    method = config.get("topk_method") or "greedy"
    if method not in METHODS:
        raise ValueError(f"topk_method {method!r} is not served; {', '.join(METHODS)} are")
    normalized = bool(config.get("norm_topk_prob", False))
    groups = method == "group_limited_greedy"
    routing = Routing(
        groups=config["n_group"] if groups else 1,
        kept_groups=config["topk_group"] if groups else 1,
        factor=1.0 if normalized else config.get("routed_scaling_factor", 1.0),
        float32_logits=True,
    )
    config = DEFAULTS | {"n_shared_experts": 2} | config
    return with_routed_experts(latent_decoder(config, interleaved=True), config, routing, normalized)


def latent_decoder(config: dict[str, Any], interleaved: bool) -> ModelSpec:
    """A spec with latent attention and without experts. `interleaved`: see `LatentSpec`."""
    rank, rope, nope = (config[name] for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"))
    bias = bool(config.get("attention_bias"))
    latent = LatentSpec(
        q_rank=config["q_lora_rank"] or None,
        rank=rank,
        nope_dim=nope,
        rope_dim=rope,
        value_dim=config["v_head_dim"],
        scale=_scale(rope_parameters(config), nope + rope),
        interleaved=interleaved,
        bias=bias,
    )
    seen = config | {"num_key_value_heads": 1, "head_dim": rank + rope}
    return common(seen, latent=latent, output_bias=bias, mlp_bias=bool(config.get("mlp_bias")))


def _scale(rope: dict[str, Any], width: int) -> float:
    """Softmax scale: width^-0.5, and with scaled RoPE and `mscale_all_dim` times yarn_mscale(factor, mscale_all_dim)^2
    (DeepSeek's own modeling files)."""
    weight = rope.get("mscale_all_dim") if rope["rope_type"] != "default" else None
    return width**-0.5 * (yarn_mscale(rope.get("factor") or 1.0, weight) ** 2 if weight else 1.0)


def with_routed_experts(
    spec: ModelSpec, config: dict[str, Any], routing: Routing, normalized: bool, layers: frozenset[int] | None = None
) -> ModelSpec:
    """The spec with the routed and shared experts of config.json, if it has any: in `layers`, or without these in every
    `moe_layer_freq`-th layer from `first_k_dense_replace` on."""
    if not config.get("n_routed_experts"):
        return spec
    first, step = config.get("first_k_dense_replace") or 0, config.get("moe_layer_freq") or 1
    inner = config["moe_intermediate_size"]
    if layers is None:
        layers = frozenset(i for i in range(spec.num_layers) if i >= first and i % step == 0)
    experts = ExpertsSpec(
        count=config["n_routed_experts"],
        top_k=config["num_experts_per_tok"],
        intermediate_size=inner,
        normalized=normalized,
        layers=layers,
        routing=routing,
        shared_size=inner * (config.get("n_shared_experts") or 0),
    )
    return with_experts(spec, experts)
