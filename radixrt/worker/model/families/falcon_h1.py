"""Falcon-H1: attention and a Mamba-2 mixer side by side in each layer, and factors of activations everywhere."""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import torch

from radixrt.worker.model.layers.fp8 import Fp8Weight
from radixrt.worker.model.layers.int4 import Int4
from radixrt.worker.model.parallel.sharding import Part
from radixrt.worker.model.spec.fields import check_served, common
from radixrt.worker.model.spec.mamba_spec import MambaSpec, read_mamba
from radixrt.worker.model.spec.norms_spec import NormsSpec
from radixrt.worker.model.spec.spec import ModelSpec
from radixrt.worker.model.weights.weight_loader import WeightLoader
from radixrt.worker.model.weights.weights import Renamed, Weights, copied_part

Multipliers = tuple[tuple[str, tuple[tuple[int, float], ...]], ...]
"""(end of a tensor's name, for consecutive rows: (their number, their factor))."""
DEFAULTS: dict[str, Any] = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192}
DEFAULTS |= {"mamba_d_ssm": 1024, "mamba_rms_norm": False, "mamba_norm_before_gate": True}
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
    plain = common(
        config,
        norms=NormsSpec(before_mlp="pre_ff_layernorm"),
        attention_bias=True,
        mlp_bias=bool(config.get("mlp_bias")),
        other_names=OTHER_NAMES,
        embedding_factor=config.get("embedding_multiplier") or 1.0,
        logits_factor=config.get("lm_head_multiplier") or 1.0,
        recurrent=mamba,
    )
    return dataclasses.replace(plain, loader=FalconLoader, loader_args=multipliers(config, plain, mamba))


class Multiplied(Renamed):
    """Weights with factors of activations multiplied into them when they are read (arXiv 2507.22448, section 3.2.3). In
    16 bits this rounds each weight once, as the factor would round each activation."""

    def __init__(self, weights: Weights, pairs: Sequence[tuple[str, str]], multipliers: Multipliers) -> None:
        super().__init__(weights, pairs)
        self._multipliers = multipliers

    def load(self, name: str, shape: Sequence[int], part: Part | None = None) -> torch.Tensor:
        rows = self._rows(name)
        if not rows:
            return super().load(name, shape, part)
        whole = super().load(name, shape)
        counts, factors = (torch.tensor(x, device=whole.device) for x in zip(*rows, strict=True))
        column = factors.float().repeat_interleave(counts, output_size=len(whole)).view(-1, *[1] * (whole.dim() - 1))
        whole = (whole.float() * column).to(whole.dtype)
        return whole if part is None else copied_part(whole, part)

    def scaled(self, name: str, shape: Sequence[int], part: Part | None = None) -> Fp8Weight | None:
        """None if multiplied: such weights are dequantized."""
        return None if self._rows(name) else super().scaled(name, shape, part)

    def int4(self, name: str, shape: Sequence[int], part: Part | None = None) -> Int4 | None:
        """As `scaled`."""
        return None if self._rows(name) else super().int4(name, shape, part)

    def _rows(self, name: str) -> tuple[tuple[int, float], ...]:
        return next((rows for end, rows in self._multipliers if name.endswith(end)), ())


class FalconLoader(WeightLoader):
    """Multiplies weights by what `multipliers` says."""

    takes_adapters = False

    def _view(self, weights: Weights) -> Multiplied:
        return Multiplied(weights, self._spec.stored.other_names, cast(Multipliers, self._spec.loader_args))


def multipliers(config: dict[str, Any], plain: ModelSpec, mamba: MambaSpec) -> Multipliers:
    """Factors of the inputs and outputs of the projections."""

    def factor(name: str) -> float:
        return 1.0 if config.get(name) is None else config[name]

    q, kv = plain.num_heads * plain.head_dim, plain.num_kv_heads * plain.head_dim
    hidden, inner = plain.hidden_size, plain.intermediate_size
    into, of_keys, out = factor("attention_in_multiplier"), factor("key_multiplier"), factor("attention_out_multiplier")
    gate, down = of_list(config, "mlp_multipliers", 2)
    parts, each = of_list(config, "ssm_multipliers", 5), mamba.groups * mamba.state
    counts = mamba.values, mamba.values, each, each, mamba.heads
    before, after = factor("ssm_in_multiplier"), factor("ssm_out_multiplier")
    factors: list[tuple[str, tuple[tuple[int, float], ...]]] = [
        ("self_attn.q_proj.weight", ((q, into),)),
        ("self_attn.k_proj.weight", ((kv, into * of_keys),)),
        ("self_attn.k_proj.bias", ((kv, of_keys),)),
        ("self_attn.v_proj.weight", ((kv, into),)),
        ("mamba.in_proj.weight", tuple((n, before * x) for n, x in zip(counts, parts, strict=True))),
        ("mamba.in_proj.bias", tuple(zip(counts, parts, strict=True))),
    ]
    for name, rows in (("self_attn.o_proj", (hidden, out)), ("mamba.out_proj", (hidden, after))):
        factors += [(f"{name}.{kind}", (rows,)) for kind in ("weight", "bias")]
    for name, rows in (("mlp.gate_proj", (inner, gate)), ("mlp.down_proj", (hidden, down))):
        factors += [(f"{name}.{kind}", (rows,)) for kind in ("weight", "bias")]
    return tuple((end, rows) for end, rows in factors if any(factor != 1 for _, factor in rows))


def of_list(config: dict[str, Any], name: str, count: int) -> list[float]:
    """So many factors; by default 1."""
    found = config.get(name) or [1.0] * count
    if len(found) != count:
        raise ValueError(f"{name} has {len(found)} numbers, expected {count}")
    return found
