"""Falcon-H1: attention and a Mamba-2 mixer side by side in each layer, and factors of activations everywhere."""

from __future__ import annotations

import dataclasses
from typing import Any

from radixrt.worker.model.spec.fields import check_served, common
from radixrt.worker.model.spec.mamba_spec import MambaSpec, read_mamba
from radixrt.worker.model.spec.spec import ModelSpec, NormsSpec
from radixrt.worker.model.weights.multipliers import Multipliers

DEFAULTS: dict[str, Any] = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192}
DEFAULTS |= {"mamba_d_ssm": 1024, "mamba_rms_norm": False, "mamba_norm_before_gate": True}
"""Defaults of transformers for fields that config.json lacks."""
OTHER_NAMES = ((".mlp.", ".feed_forward."), ("model.norm.", "model.final_layernorm."))


def spec(config: dict[str, Any]) -> ModelSpec:
    """With `mamba_d_ssm` null, the mixer has `mamba_expand` times as many elements as hidden states."""
    check_served(config, {"hidden_act": "silu"})
    config = DEFAULTS | config
    mamba = read_mamba(config, frozenset(range(config["num_hidden_layers"])), config["mamba_d_ssm"])
    assert mamba is not None
    norm = "none"
    if config["mamba_rms_norm"]:
        norm = "before_gate" if config["mamba_norm_before_gate"] else "after_gate"
    mamba = dataclasses.replace(mamba, parallel=True, norm=norm, out_bias=bool(config.get("projectors_bias")))
    bias = bool(config.get("attention_bias"))
    plain = common(
        config,
        norms=NormsSpec(before_mlp="pre_ff_layernorm"),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(config.get("mlp_bias")),
        other_names=OTHER_NAMES,
        embedding_factor=config.get("embedding_multiplier") or 1.0,
        logits_factor=config.get("lm_head_multiplier") or 1.0,
        recurrent=mamba,
    )
    return dataclasses.replace(plain, multipliers=multipliers(config, plain, mamba))


def multipliers(config: dict[str, Any], plain: ModelSpec, mamba: MambaSpec) -> Multipliers:
    """Factors of the inputs and outputs of the projections."""

    def factor(name: str) -> float:
        return 1.0 if config.get(name) is None else config[name]

    q, kv = plain.num_heads * plain.head_dim, plain.num_kv_heads * plain.head_dim
    hidden, inner = plain.hidden_size, plain.intermediate_size
    into, of_keys, out = factor("attention_in_multiplier"), factor("key_multiplier"), factor("attention_out_multiplier")
    gate, down = of_list(config, "mlp_multipliers", 2)
    own, each = of_list(config, "ssm_multipliers", 5), mamba.groups * mamba.state
    counts = mamba.values, mamba.values, each, each, mamba.heads
    before, after = factor("ssm_in_multiplier"), factor("ssm_out_multiplier")
    found: list[tuple[str, tuple[tuple[int, float], ...]]] = [
        ("self_attn.q_proj.weight", ((q, into),)),
        ("self_attn.k_proj.weight", ((kv, into * of_keys),)),
        ("self_attn.k_proj.bias", ((kv, of_keys),)),
        ("self_attn.v_proj.weight", ((kv, into),)),
        ("mamba.in_proj.weight", tuple((n, before * x) for n, x in zip(counts, own, strict=True))),
        ("mamba.in_proj.bias", tuple(zip(counts, own, strict=True))),
    ]
    for name, rows in (("self_attn.o_proj", (hidden, out)), ("mamba.out_proj", (hidden, after))):
        found += [(f"{name}.{kind}", (rows,)) for kind in ("weight", "bias")]
    for name, rows in (("mlp.gate_proj", (inner, gate)), ("mlp.down_proj", (hidden, down))):
        found += [(f"{name}.{kind}", (rows,)) for kind in ("weight", "bias")]
    return tuple((end, rows) for end, rows in found if any(factor != 1 for _, factor in rows))


def of_list(config: dict[str, Any], name: str, count: int) -> list[float]:
    """So many factors; by default 1."""
    found = config.get(name) or [1.0] * count
    if len(found) != count:
        raise ValueError(f"{name} has {len(found)} numbers, expected {count}")
    return found
