"""What a decoder's layer is made of, and what of it is fused on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional as F

from radixrt.worker.model.linear import Linear
from radixrt.worker.model.moe import Experts, sigmoid, softplus
from radixrt.worker.model.parallel import Group
from radixrt.worker.model.rope import rotate
from radixrt.worker.model.scaled import Rounded, Rounding, Scaled, ScaledLinear, rounded
from radixrt.worker.model.spec import CLAMPED_SWIGLU

if TYPE_CHECKING:
    from radixrt.worker.model.mlp import Mixture, Mlp, Plain


def _clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate), of a gate of at most `limit` and an up within it (gpt-oss,
    transformers' `GptOssExperts`)."""
    limit, alpha = CLAMPED_SWIGLU
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(alpha * gate))


_GATES = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_pytorch_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "clamped_swiglu": _clamped_swiglu,
}


class Ops(Protocol):
    """What is fused on a GPU (`cuda.kernels`), and here in plain torch."""

    def norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        rounding: Rounding | None = None,
        centered: bool = False,
    ) -> torch.Tensor | Rounded:
        """RMSNorm of x[T, H], less its mean if `centered`, by a weight of the dtype of x, or of float32 (see
        `NormsSpec`); rounded, if asked for."""

    def gate(self, x: torch.Tensor, activation: str, rounding: Rounding | None = None) -> torch.Tensor | Rounded:
        """act(first half) * second half of x[T, 2 I], or what else the activation makes of both: [T, I]; rounded, if
        asked for."""

    def scaled(
        self,
        x: torch.Tensor | Rounded,
        weight: Scaled,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x[T, K], which is rounded first if it is not yet, times the weight, plus bias[N], in `dtype`; added to
        residual[T, N] in place, if that is given."""

    def few(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor | None = None,
        add: bool = False,
    ) -> torch.Tensor | None:
        """x[T, K] times weight[N, K] transposed, plus bias[N], of few rows: a tensor of its own, or written to
        out[T, N], or added there. None, and nothing done, where torch's product is for them."""

    def gated(self, x: torch.Tensor, weight: torch.Tensor, activation: str) -> torch.Tensor | None:
        """`gate` of x[T, K] times weight[2 I, K] transposed, of many rows, by one kernel: [T, I]. None, and nothing
        done, where a product and a gate are faster."""

    def experts(self, experts: Experts, x: torch.Tensor, residual: torch.Tensor) -> None:
        """Add what a mixture of experts makes of x[T, hidden] to residual[T, hidden], in place."""

    def means(self, qkv: torch.Tensor, num_heads: int, kv_heads: int) -> torch.Tensor:
        """float32[T, 2] of qkv[T, heads + 2 kv_heads, D]: the means of the squares of all that q has, and of k."""


def _normalized(x: torch.Tensor, weight: torch.Tensor, eps: float, mean: torch.Tensor | None = None) -> torch.Tensor:
    """RMSNorm (arXiv 1910.07467) in float32, over the last dimension, or by a `mean` of squares that is known. What a
    weight multiplies is rounded to its dtype: that of x, or float32."""
    wide = x.float()
    mean = wide.square().mean(-1, keepdim=True) if mean is None else mean
    return (weight * (wide * torch.rsqrt(mean + eps)).to(weight.dtype)).to(x.dtype)


class TorchOps:
    """The reference of what is fused."""

    @staticmethod
    def norm(
        x: torch.Tensor, weight: torch.Tensor, eps: float, rounding: Rounding | None = None, centered: bool = False
    ) -> torch.Tensor | Rounded:
        known = x.float() - x.float().mean(-1, keepdim=True) if centered else x
        out = _normalized(known, weight, eps).to(x.dtype)
        return out if rounding is None else rounded(out, rounding)

    @staticmethod
    def gate(x: torch.Tensor, activation: str, rounding: Rounding | None = None) -> torch.Tensor | Rounded:
        gate, up = x.chunk(2, dim=-1)
        out = _GATES[activation](gate, up)
        return out if rounding is None else rounded(out, rounding)

    @staticmethod
    def scaled(
        x: torch.Tensor | Rounded,
        weight: Scaled,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        known = x if isinstance(x, Rounded) else rounded(x, weight.rounding)
        out = F.linear(known.wide(), weight.wide(), None if bias is None else bias.float())
        return out.to(dtype) if residual is None else residual.add_(out)

    @staticmethod
    def few(*_: object) -> None:
        """All rows are for torch's products."""

    @staticmethod
    def gated(*_: object) -> None:
        """A product, and a gate."""

    @staticmethod
    def experts(experts: Experts, x: torch.Tensor, residual: torch.Tensor) -> None:
        experts.one_by_one(x, residual, TorchOps())

    @staticmethod
    def means(qkv: torch.Tensor, num_heads: int, kv_heads: int) -> torch.Tensor:
        q, k, _ = qkv.float().square().split((num_heads, kv_heads, kv_heads), dim=1)
        return torch.stack((q.flatten(1).mean(1), k.flatten(1).mean(1)), dim=1)


class Projected(Protocol):
    """What a layer gives to its attention: the projections of T tokens, not yet normalized and rotated."""

    @property
    def cos(self) -> torch.Tensor:
        """[T, 1, half of what is rotated]."""

    def split(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, heads, D], k [T, kv_heads, D], v [T, kv_heads, width of V], normalized and rotated."""

    def scale_queries(self, factors: torch.Tensor) -> None:
        """Multiply q by factors[T, 1, 1], in place: turning it comes to the same after and before."""

    @property
    def values(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """What makes of sums of V by weights, [T, heads, width of V], what heads give, [T, heads, width of a head's
        value]."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Projected, of grouped-query attention."""

    qkv: torch.Tensor
    """[T, heads + 2 kv_heads, D]."""
    num_heads: int
    norms: tuple[torch.Tensor, torch.Tensor] | None
    """Weights [D] of the RMSNorm of each head of q and of k, where a model has one; with `means` those of all heads."""
    eps: float
    cos: torch.Tensor
    """[T, 1, half of what is rotated], and `sin` as well."""
    sin: torch.Tensor
    means: torch.Tensor | None = None
    """float32[T, ranks, 2]: of all heads together, where they are normalized so, what `Ops.means` gave on each rank."""

    def split(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, heads, D], k and v [T, kv_heads, D], normalized and rotated."""
        kv_heads = (self.qkv.shape[1] - self.num_heads) // 2
        q, k, v = self.qkv.split((self.num_heads, kv_heads, kv_heads), dim=1)
        if self.norms is not None and self.means is not None:
            # One rank's after the other: a sum by torch may round by its shape.
            both = sum(self.means.unbind(1)) / self.means.shape[1]
            q, k = (
                _normalized(x, weight.view(-1, x.shape[-1]), self.eps, mean[:, None, None])
                for x, weight, mean in zip((q, k), self.norms, both.unbind(1), strict=True)
            )
        elif self.norms is not None:
            q, k = _normalized(q, self.norms[0], self.eps), _normalized(k, self.norms[1], self.eps)
        return rotate(q, self.cos, self.sin), rotate(k, self.cos, self.sin), v

    def scale_queries(self, factors: torch.Tensor) -> None:
        assert self.norms is None, "a norm would undo it"
        self.qkv[:, : self.num_heads].mul_(factors)

    @property
    def values(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return _same


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


Product = Linear | ScaledLinear

Attend = Callable[[int, Projected], torch.Tensor]
"""(layer, its heads) -> [T, heads, width of a head's value]; stores k and v first."""


class Projections(Protocol):
    """What a layer puts around its attention."""

    def project(self, x: torch.Tensor | Rounded, cos: torch.Tensor, sin: torch.Tensor, ops: Ops) -> Projected:
        """Of normalized x[T, hidden]; cos, sin are [T, 1, half of what is rotated]."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """What the output projection takes, [T, inner], of what attention gave, [T, heads, width of a head's value]."""

    @property
    def rounding(self) -> Rounding | None:
        """Of what `project` takes."""

    @property
    def products(self) -> list[Product]:
        """The matrices that every token is multiplied by."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """Projections of grouped-query attention; q, k and v are one matrix."""

    qkv: Product
    num_heads: int
    head_dim: int
    norms: tuple[torch.Tensor, torch.Tensor] | None
    """See `Heads.norms`."""
    eps: float
    whole: bool = False
    """All heads are normalized together: of a `group` those of all ranks."""
    group: Group | None = None
    last: bool = False
    """Each head is normalized after it is rotated."""

    def project(self, x: torch.Tensor | Rounded, cos: torch.Tensor, sin: torch.Tensor, ops: Ops) -> Heads:
        qkv = self.qkv(x).unflatten(1, (-1, self.head_dim))
        if self.last:
            self._rotate_and_normalize(qkv, cos, sin)
            return Heads(qkv, self.num_heads, None, self.eps, torch.ones_like(cos), torch.zeros_like(sin))
        means = self._means(qkv, ops) if self.whole else None
        return Heads(qkv, self.num_heads, self.norms, self.eps, cos, sin, means)

    def _rotate_and_normalize(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """In place: what is fused normalizes first."""
        assert self.norms is not None
        kv_heads = (qkv.shape[1] - self.num_heads) // 2
        for heads, weight in zip(qkv.split((self.num_heads, kv_heads, kv_heads), dim=1), self.norms, strict=False):
            heads.copy_(_normalized(rotate(heads, cos, sin), weight, self.eps))

    def _means(self, qkv: torch.Tensor, ops: Ops) -> torch.Tensor:
        """See `Heads.means`. All ranks have as many heads; where several have the same of k, all heads of k are had as
        often, and the mean over ranks is that over heads."""
        means = ops.means(qkv, self.num_heads, (qkv.shape[1] - self.num_heads) // 2)
        return (means if self.group is None else self.group.gather(means)).unflatten(1, (-1, 2))

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1)

    @property
    def rounding(self) -> Rounding | None:
        return self.qkv.rounding

    @property
    def products(self) -> list[Product]:
        return [self.qkv]


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm, or LayerNorm if `centered`; `rounding` is that of what its result goes into."""

    weight: torch.Tensor
    eps: float
    rounding: Rounding | None
    centered: bool = False

    def __call__(self, x: torch.Tensor, ops: Ops) -> torch.Tensor | Rounded:
        return ops.norm(x, self.weight, self.eps, self.rounding, self.centered)


@dataclass(frozen=True, slots=True)
class NoNorm:
    """In the place of a `Norm`, where a model has none."""

    def __call__(self, x: torch.Tensor, ops: Ops) -> torch.Tensor:
        return x


@dataclass(frozen=True, slots=True)
class Output:
    """A projection back to the residual stream. The ranks of a `group` divide its input features: what each of them
    makes is a part of a sum, in `turn`."""

    product: Product
    group: Group | None
    turn: int
    after: Norm | None = None
    """Of the result, before it is added."""
    factor: float = 1.0
    """Of the result, where it has no such norm."""

    @property
    def rounding(self) -> Rounding | None:
        """Of what it multiplies."""
        return self.product.rounding

    def add(
        self, x: torch.Tensor | Rounded, residual: torch.Tensor, norm: Norm | NoNorm, ops: Ops
    ) -> torch.Tensor | Rounded:
        """Add the result to residual[T, hidden], in place; the norm of that."""
        if self.after is not None:
            residual.add_(self._normalized(x, residual, self.after, ops))
            return norm(residual, ops)
        if self.group is None:
            self.product.add(x, residual, self.factor)
            return norm(residual, ops)
        part = self.group.room(self.turn, residual)
        self.product.put(x, part)
        if self.factor != 1:
            part *= self.factor
        return self.group.add(self.turn, part, residual, norm, ops)

    def _normalized(self, x: torch.Tensor | Rounded, residual: torch.Tensor, after: Norm, ops: Ops) -> torch.Tensor:
        """The norm of the result [T, hidden], of all ranks together."""
        if self.group is None:
            return after(self.product(x), ops)
        part = self.group.room(self.turn, residual)
        self.product.put(x, part)
        return self.group.add(self.turn, part, torch.zeros_like(residual), after, ops)


@dataclass(frozen=True, slots=True)
class Gate:
    """What attention gave is times the sigmoid, or the softplus, of a product of what it took (arXiv 2505.06708)."""

    norm: Norm | NoNorm
    """Gives what attention took. It is computed again, for nothing is kept beside the residual stream while attention
    is."""
    product: Product
    """To as many numbers as attention gave, or to one a head."""
    softplus: bool

    def __call__(self, attended: torch.Tensor, residual: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Of attended[T, inner], before its projection is added to residual[T, hidden]."""
        made = self.product(self.norm(residual, ops))
        if self.softplus:
            gate = softplus(made.float()).to(made.dtype)
        else:
            gate = made.sigmoid() if made.is_cuda else sigmoid(made)
        return (attended.unflatten(1, (gate.shape[1], -1)) * gate[..., None]).flatten(1)


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer."""

    attention_norm: Norm | NoNorm
    heads: Projections
    output: Output
    mlp_norm: Norm | NoNorm
    mlp: Mlp | Plain | Mixture
    sinks: torch.Tensor | None = None
    """float32[heads], where attention has them (see `ModelSpec.sinks`)."""
    gate: Gate | None = None
    """See `ModelSpec.gate`."""
