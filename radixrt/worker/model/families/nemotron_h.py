"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: Mamba-2 mixers, a few layers with attention without RoPE, and MLPs or
experts without gates, each of which is a layer of its own in the checkpoint (see `hybrid_layers`)."""

import dataclasses
from typing import Any

from radixrt.worker.model.families.deepseek_v3 import sigmoid_routing
from radixrt.worker.model.layers.hybrid_layers import HybridLayers, paired
from radixrt.worker.model.spec.expert_spec import ExpertsSpec
from radixrt.worker.model.spec.fields import check_served, common, with_experts
from radixrt.worker.model.spec.mamba_spec import FULL, LINEAR, MambaSpec, checked, time_step_limit
from radixrt.worker.model.spec.norms_spec import NormsSpec
from radixrt.worker.model.spec.spec import SQUARED_RELU, ModelSpec

DEFAULTS: dict[str, Any] = {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 21_504}
DEFAULTS |= {"max_position_embeddings": 4096, "layer_norm_epsilon": 1e-5, "mamba_num_heads": 128, "mamba_head_dim": 64}
DEFAULTS |= {"n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "use_conv_bias": True, "n_routed_experts": 8}
DEFAULTS |= {"num_experts_per_tok": 2, "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688}
SERVED = {"mlp_hidden_act": SQUARED_RELU, "mamba_hidden_act": "silu", "attention_bias": False, "mamba_proj_bias": False}
SERVED |= {"residual_in_fp32": False, "sliding_window": None, "n_shared_experts": 1}
ALIASES = {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias"}
ALIASES |= {"mamba_dt_limit": "time_step_limit"}
"""Other names of fields, which come first, as in transformers."""
KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Of `hybrid_override_pattern`."""
FUSED_NAMES = (("mlp.gate.weight", "mlp.experts.up_proj", "mlp.experts.down_proj"),)


def spec(config: dict[str, Any]) -> ModelSpec:
    """Time steps are limited by `time_step_limit`, as in NVIDIA's own modeling files; not by `time_step_min`, as
    transformers does in prompts alone. Layers that predict further tokens are ignored."""
    check_served(config, SERVED)
    config = DEFAULTS | {name: value for name, value in config.items() if value is not None}
    config |= {name: config[alias] for alias, name in ALIASES.items() if alias in config}
    kinds = layer_kinds(config)
    blocks = paired(kind in (*LINEAR, *FULL) for kind in kinds)
    mlps = [None if mlp is None else kinds[mlp] for _, mlp in blocks]
    plain = common(
        config | {"num_hidden_layers": len(blocks), "rms_norm_eps": config["layer_norm_epsilon"], "hidden_act": "silu"},
        norms=NormsSpec(float32_weight=True),
        mlp_bias=bool(config.get("mlp_bias")),
        layer_ropes=(None,) * len(blocks),
        recurrent=mamba(config, kinds, blocks),
        hybrid_layers=blocks,
    )
    plain = dataclasses.replace(plain, activation=SQUARED_RELU)
    sparse = frozenset(i for i, kind in enumerate(mlps) if kind == "moe")
    return with_experts(plain, experts(config, sparse)) if sparse else plain


def layer_kinds(config: dict[str, Any]) -> list[str]:
    """The kind of each of the checkpoint's layers. ValueError if there are others than are served, or if no layer has
    attention or none a Mamba-2 mixer."""
    name = next((name for name in ("layer_types", "layers_block_type") if name in config), "hybrid_override_pattern")
    if name == "hybrid_override_pattern":
        kinds = [KINDS.get(kind, kind) for kind in config.get(name, "ME*-")]
    else:
        kinds = config[name]
    if others := sorted(set(kinds) - {*LINEAR, *FULL, "mlp", "moe"}):
        raise ValueError(f"{name} {', '.join(others)} are not served; mamba, attention, mlp and moe are")
    for served in (LINEAR, FULL):
        if not set(kinds) & set(served):
            raise ValueError(f"{name}: none is {served[0]}")
    if config.get("num_hidden_layers", len(kinds)) != len(kinds):
        raise ValueError(f"{name} has {len(kinds)} layers, num_hidden_layers is {config['num_hidden_layers']}")
    return kinds


def mamba(config: dict[str, Any], kinds: list[str], blocks: HybridLayers) -> MambaSpec:
    """The Mamba-2 mixers."""
    return checked(
        MambaSpec(
            layers=frozenset(i for i, (mixer, _) in enumerate(blocks) if mixer is not None and kinds[mixer] in LINEAR),
            heads=config["mamba_num_heads"],
            head_dim=config["mamba_head_dim"],
            groups=config["n_groups"],
            state=config["ssm_state_size"],
            kernel=config["conv_kernel"],
            conv_bias=bool(config["use_conv_bias"]),
            bias=bool(config.get("use_bias")),
            out_bias=bool(config.get("use_bias")),
            limits=time_step_limit(config),
        )
    )


def experts(config: dict[str, Any], layers: frozenset[int]) -> ExpertsSpec:
    """Experts without gates, in these layers of the decoder. In the largest models they are computed in a smaller
    space (`moe_latent_size`)."""
    if config.get("moe_latent_size"):
        check_served(config, {"mlp_bias": False})
    return ExpertsSpec(
        count=config["n_routed_experts"],
        top_k=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"],
        normalized=bool(config.get("norm_topk_prob", True)),
        layers=layers,
        names=("up_proj", "down_proj"),
        routing=sigmoid_routing(config, float32_weight=True),
        shared_size=config["moe_shared_expert_intermediate_size"],
        latent_size=config.get("moe_latent_size") or 0,
        latent=("fc1_latent_proj", "fc2_latent_proj"),
        fused_names=FUSED_NAMES,
    )
