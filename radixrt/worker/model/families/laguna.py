"""Poolside's Laguna: gated attention; layers with sliding windows have more query heads than others, and rotate more of
each; experts selected by sigmoid."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.nn import functional as F

from radixrt.worker.model.layers.fp8 import Fp8Weight
from radixrt.worker.model.layers.int4 import Int4
from radixrt.worker.model.parallel.sharding import Part
from radixrt.worker.model.spec.expert_spec import ExpertsSpec, Routing
from radixrt.worker.model.spec.fields import (
    check_served,
    common,
    layer_windows,
    moe_layers,
    partial_rotary_dim,
    rope_parameters,
    ropes_by_kind,
    with_experts,
)
from radixrt.worker.model.spec.spec import GateSpec, ModelSpec
from radixrt.worker.model.weights.weight_loader import WeightLoader
from radixrt.worker.model.weights.weights import Renamed, Weights

DEFAULTS: dict[str, Any] = {"head_dim": 128, "num_key_value_heads": 8, "sliding_window": 512}
DEFAULTS |= {"max_position_embeddings": 131_072, "num_experts": 256, "num_experts_per_tok": 8}
DEFAULTS |= {"moe_intermediate_size": 512, "gating": True, "shared_expert_intermediate_size": 512}
DEFAULTS |= {"moe_routed_scaling_factor": 1.0}
ROPES = {"rope_theta": None, "rope_scaling": None, "partial_rotary_factor": None}
"""These fields of config.json are ignored: only `rope_parameters` counts."""
ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
SERVED = {"norm_topk_prob": True, "moe_apply_router_weight_on_input": False, "moe_router_logit_softcapping": 0.0}
OTHER_NAMES = ((".mlp.shared_expert.", ".mlp.shared_experts."),)


def spec(config: dict[str, Any]) -> ModelSpec:
    """Without `layer_types`, all layers have full attention; without `mlp_layer_types`, all but the first have experts.
    `gating` says whether a gate is for a head or an element."""
    check_served(config, SERVED)
    config = DEFAULTS | config | ROPES
    layers, gating = config["num_hidden_layers"], config["gating"]
    if gating not in (True, "per-head", "per-element"):
        raise ValueError(f"gating {gating!r} is not served; true, 'per-head' and 'per-element' are")
    kinds = config.get("layer_types") or ["full_attention"] * layers
    heads = tuple(config.get("num_attention_heads_per_layer") or (config["num_attention_heads"],) * layers)
    config |= {"layer_types": kinds, "num_attention_heads": max(heads)}
    config["rope_parameters"] = config.get("rope_parameters") or ROPE
    by_kind, head_dim = ropes_by_kind(config), config["head_dim"]
    plain = common(
        by_kind["full_attention"],
        windows=layer_windows(config),
        layer_ropes=tuple(_with_rotary_dim(rope_parameters(by_kind[kind]), head_dim) for kind in kinds),
        qk_norm=True,
        attention_bias=True,
        gate=GateSpec("g_proj", per_head=gating != "per-element", softplus=True),
        other_names=OTHER_NAMES,
    )
    if len(heads) != layers or any(n % plain.num_kv_heads for n in heads):
        raise ValueError(f"num_attention_heads_per_layer {list(heads)} is not served; multiples of the KV heads are")
    if len(set(heads)) > 1:
        plain = dataclasses.replace(plain, loader=LagunaLoader, loader_args=heads)
    experts = ExpertsSpec(
        count=config["num_experts"],
        top_k=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"],
        normalized=True,
        layers=moe_layers(config, dense=1),
        bias=("experts.e_score_correction_bias", "gate.e_score_correction_bias"),
        routing=Routing(sigmoid=True, factor=config["moe_routed_scaling_factor"]),
        shared_size=config["shared_expert_intermediate_size"],
        shared="shared_expert",
    )
    return with_experts(plain, experts)


class PaddedHeads(Renamed):
    """Pads layers that have fewer query heads than others with heads of zeros, so that attention has the same shape in
    all layers.

        in the group of query heads of each KV head:   q_proj  zero rows at the end   o_proj  zero columns at the end

    The output of a padding head is multiplied by zeros, so the result does not change, and no more of K and V is read.
    (A quarter of the published layers have 6 query heads per KV head, the others 8 or 9.)"""

    def __init__(self, weights: Weights, spec: ModelSpec, heads: Sequence[int]) -> None:
        super().__init__(weights, spec.stored.other_names)
        self._spec = spec
        self._heads = heads
        rows = "q_proj" if spec.attention.gate is None else f"(?:q_proj|{spec.attention.gate.name})"
        self._pattern = re.compile(rf"\.layers\.(\d+)\.self_attn\.(?:{rows}\.(?:weight|bias)|(o_proj)\.weight)$")

    def load(self, name: str, shape: Sequence[int], part: Part | None = None) -> torch.Tensor:
        if (found := self._short_of_heads(name)) is None:
            return super().load(name, shape, part)
        heads, dim = found
        stored = list(shape)
        stored[dim] = shape[dim] // self._spec.num_heads * heads
        whole = self._pad(super().load(name, stored), heads, dim)
        return whole if part is None else whole.narrow(part.dim, part.start, part.count).contiguous()

    def scaled(self, name: str, shape: Sequence[int], part: Part | None = None) -> Fp8Weight | None:
        """None if padded: such weights are dequantized."""
        return super().scaled(name, shape, part) if self._short_of_heads(name) is None else None

    def int4(self, name: str, shape: Sequence[int], part: Part | None = None) -> Int4 | None:
        """As `scaled`."""
        return super().int4(name, shape, part) if self._short_of_heads(name) is None else None

    def _short_of_heads(self, name: str) -> tuple[int, int] | None:
        """(its heads, their dimension) if the tensor has fewer heads than `num_heads`, else None."""
        match = self._pattern.search(name)
        if match is None or (heads := self._heads[int(match[1])]) == self._spec.num_heads:
            return None
        return heads, 1 if match[2] else 0

    def _pad(self, own: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
        kv_heads, missing = self._spec.num_kv_heads, self._spec.num_heads - heads
        groups = own.unflatten(dim, (kv_heads, heads // kv_heads, -1))
        behind = groups.dim() - dim - 2  # dimensions after that of a group's heads: F.pad counts from the last one
        return F.pad(groups, (0, 0) * behind + (0, missing // kv_heads)).flatten(dim, dim + 2)


class LagunaLoader(WeightLoader):
    """Pads heads."""

    takes_adapters = False

    def _view(self, weights: Weights) -> PaddedHeads:
        return PaddedHeads(weights, self._spec, cast(tuple[int, ...], self._spec.loader_args))


def _with_rotary_dim(rope: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Replace `partial_rotary_factor` by `rotated`, a number of elements, since layers differ in it."""
    rotary_dim = partial_rotary_dim({}, rope, head_dim)
    return rope | {"rotated": rotary_dim or head_dim}
