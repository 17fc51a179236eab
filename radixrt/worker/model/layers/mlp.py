"""MLPs: with and without a gate, shared experts, and the mixture of experts that takes an MLP's place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from radixrt.worker.model.layers.fp8 import Activations, Fp8Scaling, plain
from radixrt.worker.model.layers.layers import FeedForward, Output
from radixrt.worker.model.layers.linear import Linear, Product
from radixrt.worker.model.layers.moe import Experts, sigmoid
from radixrt.worker.model.layers.norms import NoNorm, Norm
from radixrt.worker.model.layers.ops import Ops
from radixrt.worker.model.lora.lora import LoraLinear
from radixrt.worker.model.parallel.group import Group


@dataclass(frozen=True, slots=True)
class Mlp(FeedForward):
    """down(act(gate(x)) * up(x)); `gate_up` is one matrix, the rows of the gate first."""

    gate_up: Product
    down: Output
    activation: str

    @property
    def fp8_scaling(self) -> Fp8Scaling | None:
        return self.gate_up.fp8_scaling

    def add(self, x: Activations, residual: torch.Tensor, norm: Norm | NoNorm, ops: Ops) -> Activations:
        return self.down.add(_activated(self, x, ops), residual, norm, ops)


@dataclass(frozen=True, slots=True)
class UngatedMlp(FeedForward):
    """An MLP without a gate: down(activation(up(x)))."""

    up: Product
    down: Output
    activation: Callable[[torch.Tensor], torch.Tensor] | None = None
    """None: squared ReLU."""

    @property
    def fp8_scaling(self) -> Fp8Scaling | None:
        return self.up.fp8_scaling

    def add(self, x: Activations, residual: torch.Tensor, norm: Norm | NoNorm, ops: Ops) -> Activations:
        inner = self.up(x)
        made = ops.squared_relu(inner, self.down.fp8_scaling) if self.activation is None else self.activation(inner)
        return self.down.add(made, residual, norm, ops)


UNGATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
"""Activations of `UngatedMlp`, but squared ReLU and XIELU, which has parameters."""


@dataclass(frozen=True, slots=True)
class Xielu:
    """xIELU (arXiv 2411.13010), in float32:

    x > 0:   positive x^2 + beta x                            else:   negative (exp(min(x, eps)) - 1 - x) + beta x"""

    positive: torch.Tensor
    negative: torch.Tensor
    beta: torch.Tensor
    eps: torch.Tensor

    @classmethod
    def learned(cls, alpha_p: torch.Tensor, alpha_n: torch.Tensor, beta: torch.Tensor, eps: torch.Tensor) -> Xielu:
        """From the learned parameters, as checkpoints store them."""
        alpha_p, alpha_n, beta, eps = (x.float().flatten() for x in (alpha_p, alpha_n, beta, eps))
        return cls(F.softplus(alpha_p), beta + F.softplus(alpha_n), beta, eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        below = torch.minimum(wide, self.eps).expm1_().sub_(wide).mul_(self.negative)
        return torch.where(wide > 0, self.positive * wide * wide, below).addcmul_(wide, self.beta).to(x.dtype)


@dataclass(frozen=True, slots=True)
class SharedMlp:
    """Shared experts: a gated MLP for every token, beside its routed experts. In a group, each rank has a part of its
    intermediate features, as of every expert's."""

    gate_up: Product
    down: Product
    activation: str
    gate: Linear | None = None
    """To one number, whose sigmoid scales the result; the same on all ranks."""

    def add(self, x: Activations, residual: torch.Tensor, ops: Ops) -> None:
        """Add the output for x[T, hidden] to residual[T, hidden], in place."""
        inner = _activated(self, x, ops)
        if self.gate is None:
            self.down.add(inner, residual)
        else:
            residual.add_(self.down(inner).mul_(sigmoid(self.gate(x))))


@dataclass(frozen=True, slots=True)
class UngatedShared:
    """`SharedMlp` without gates, with squared ReLU."""

    up: Product
    down: Product

    def add(self, x: Activations, residual: torch.Tensor, ops: Ops) -> None:
        """As `SharedMlp.add`."""
        self.down.add(ops.squared_relu(self.up(x), self.down.fp8_scaling), residual)


def _activated(mlp: Mlp | SharedMlp, x: Activations, ops: Ops) -> Activations:
    """The input of `down`, for normalized x[T, hidden]."""
    fp8_scaling = mlp.down.fp8_scaling
    if fp8_scaling is None and isinstance(mlp.gate_up, Linear | LoraLinear):
        inner = mlp.gate_up.gated_linear(plain(x), mlp.activation)
        if inner is not None:
            return inner
    return ops.gate(mlp.gate_up(x), mlp.activation, fp8_scaling)


@dataclass(frozen=True, slots=True)
class Mixture(FeedForward):
    """Routed experts, and maybe shared ones, in place of an MLP. In a `group`, each rank has a part of every expert's
    intermediate features."""

    experts: Experts
    group: Group | None
    turn: int
    """See `layers.Output`."""
    shared: SharedMlp | UngatedShared | None = None
    after: Norm | None = None
    """Norm of the experts' sum, before it is added to the residual stream."""
    factor: float = 1.0
    """Multiplies the experts' sum; ignored if there is such a norm."""

    @property
    def fp8_scaling(self) -> Fp8Scaling | None:
        return self.experts.fp8_scaling

    def add(self, x: Activations, residual: torch.Tensor, norm: Norm | NoNorm, ops: Ops) -> Activations:
        if self.group is None and self.after is None and self.factor == 1:
            self._add(x, residual, ops)
            return norm(residual, ops)
        part = torch.zeros_like(residual) if self.group is None else self.group.buffer(self.turn, residual).zero_()
        self._add(x, part, ops)
        if self.after is not None:
            if self.group is None:
                return ops.add_normed(part, self.after, residual, norm)
            residual.add_(plain(self.group.add(self.turn, part, torch.zeros_like(part), self.after, ops)))
            return norm(residual, ops)
        if self.factor != 1:
            part *= self.factor
        if self.group is None:
            return norm(residual.add_(part), ops)
        return self.group.add(self.turn, part, residual, norm, ops)

    def _add(self, x: Activations, residual: torch.Tensor, ops: Ops) -> None:
        ops.experts(self.experts, plain(x), residual)
        if self.shared is not None:
            self.shared.add(x, residual, ops)
