"""Mixture of experts: a router picks the experts of each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from radixrt.worker.model.checkpoint import Weights
from radixrt.worker.model.linear import Linear
from radixrt.worker.model.spec import ModelSpec

if TYPE_CHECKING:
    from radixrt.worker.model.decoder import Ops

WHOLE = "mlp."
"""Where transformers 5 has all experts of a layer in one tensor, of every family; it seldom writes files so."""


@dataclass(frozen=True, slots=True)
class Experts:
    """`gate_up` [E, 2 I, hidden] (the rows of the gate first) and `down` [E, hidden, I] of all E experts of a layer."""

    router: Linear
    gate_up: torch.Tensor
    down: torch.Tensor
    chosen: int
    """Experts a token."""
    normalized: bool
    """The weights of a token's experts sum to 1."""
    activation: str
    batch_invariant: bool

    rounding: ClassVar[None] = None
    """What they take is not rounded."""

    def add(self, x: torch.Tensor, residual: torch.Tensor, ops: Ops) -> None:
        """Add what they make of x[T, hidden] to residual[T, hidden], in place."""
        ops.experts(self, x, residual)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights, int64 numbers) of each token's experts, the likeliest first, both [T, chosen]."""
        shares = self.router(x).float().softmax(-1)
        weights, experts = shares.topk(self.chosen, dim=-1)
        if self.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), experts

    def one_by_one(self, x: torch.Tensor, residual: torch.Tensor, ops: Ops) -> None:
        """The reference of `Ops.experts`: expert after expert, whose tokens the host counts."""
        weights, experts = self.route(x)
        order = experts.flatten().argsort(stable=True)
        counts = experts.flatten().bincount(minlength=len(self.down)).tolist()
        parts = []
        for expert, part in enumerate(x[order // self.chosen].split(counts)):
            if len(part):
                inner = ops.gate(Linear(self.gate_up[expert], None, self.batch_invariant)(part), self.activation)
                parts.append(Linear(self.down[expert], None, self.batch_invariant)(inner))
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        residual.add_((torch.cat(parts)[back].unflatten(0, (-1, self.chosen)) * weights[..., None]).sum(1))


def read_experts(spec: ModelSpec, weights: Weights, layer: int, batch_invariant: bool) -> Experts:
    """The experts of a layer, by the names of the family (`ExpertsSpec`), or all in one tensor."""
    moe = spec.experts
    assert moe is not None
    at, hidden, inner = f"model.layers.{layer}.{moe.prefix}.", spec.hidden_size, moe.intermediate_size
    shapes = (moe.count, 2 * inner, hidden), (moe.count, hidden, inner)
    whole = f"model.layers.{layer}.{WHOLE}"
    if f"{whole}experts.gate_up_proj" in weights:
        router = weights.load(f"{whole}gate.weight", (moe.count, hidden))
        gate_up = weights.load(f"{whole}experts.gate_up_proj", shapes[0])
        down = weights.load(f"{whole}experts.down_proj", shapes[1])
    else:
        router = weights.load(f"{at}gate.weight", (moe.count, hidden))
        gate_up, down = (torch.empty(shape, dtype=router.dtype, device=router.device) for shape in shapes)
        gate_name, up_name, down_name = moe.names
        for expert in range(moe.count):
            name = f"{at}experts.{expert}."
            gate_up[expert, :inner] = weights.load(f"{name}{gate_name}.weight", (inner, hidden))
            gate_up[expert, inner:] = weights.load(f"{name}{up_name}.weight", (inner, hidden))
            down[expert] = weights.load(f"{name}{down_name}.weight", (hidden, inner))
    return Experts(
        Linear(router, None, batch_invariant), gate_up, down, moe.chosen, moe.normalized, spec.activation,
        batch_invariant,
    )  # fmt: skip
