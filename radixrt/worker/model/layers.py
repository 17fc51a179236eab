"""The parts of a decoder layer, and the operations that have fused kernels on a GPU (`Ops`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional as F

from radixrt.worker.model.int4 import Int4, Int4Linear
from radixrt.worker.model.linear import Linear
from radixrt.worker.model.lora import LoraLinear, Rows, Stack, add_by_adapter
from radixrt.worker.model.moe import Experts, sigmoid, softplus
from radixrt.worker.model.norms import HeadNorms, layer_norm, rms_norm
from radixrt.worker.model.parallel import Group
from radixrt.worker.model.rope import rotate
from radixrt.worker.model.scaled import Rounded, Rounding, Scaled, ScaledLinear, rounded
from radixrt.worker.model.spec import CLAMPED_SWIGLU

if TYPE_CHECKING:
    from radixrt.worker.model.blocks import NoMixer, NoMlp, NoOutput
    from radixrt.worker.model.delta_net import DeltaNet
    from radixrt.worker.model.experts_beside import ExpertsBeside
    from radixrt.worker.model.layer_inputs import LayerEnd
    from radixrt.worker.model.mamba_mixer import Mamba
    from radixrt.worker.model.mlp import Mixture, Mlp, UngatedMlp
    from radixrt.worker.model.short_conv import ShortConv


def _clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate), with gate clamped to at most `limit` and up to [-limit, limit] (gpt-oss;
    transformers, `GptOssExperts`)."""
    limit, alpha = CLAMPED_SWIGLU
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(alpha * gate))


_ACTIVATIONS = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_pytorch_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "clamped_swiglu": _clamped_swiglu,
}


class Ops(Protocol):
    """Operations with fused kernels on a GPU (`cuda.ops`); `TorchOps` computes them in plain torch.

    `rounding`: quantize the result to FP8 with scales of that kind; None: keep the dtype of x."""

    def norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        rounding: Rounding | None = None,
        centered: bool = False,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor | Rounded:
        """RMSNorm of x[T, H], or LayerNorm if `centered`, maybe with a bias [H]. The weight [H] and the bias have the
        dtype of x, or float32 (see `NormsSpec.float32_weight`)."""

    def add_normed(
        self,
        x: torch.Tensor,
        after: Norm,
        residual: torch.Tensor,
        norm: Norm | NoNorm,
        scalar: torch.Tensor | None = None,
    ) -> torch.Tensor | Rounded:
        """Add the norm `after` of x[T, H] to residual[T, H], and then multiply that by scalar[1], if given, both in
        place. Returns the `norm` of the new residual."""

    def gate(
        self, x: torch.Tensor, activation: str, rounding: Rounding | None = None, up: torch.Tensor | None = None
    ) -> torch.Tensor | Rounded:
        """act(gate) * up, or another function of both (see `_ACTIVATIONS`): [T, I], of x[T, 2 I], gate first, or of the
        gate x[T, I] and up[T, I], whose rows may be apart."""

    def squared_relu(self, x: torch.Tensor, rounding: Rounding | None = None) -> torch.Tensor | Rounded:
        """relu(x[T, I])^2 (arXiv 2109.08668), in place unless it is quantized."""

    def scaled(
        self,
        x: torch.Tensor | Rounded,
        weight: Scaled,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The product of x[T, K] and an FP8 weight [N, K] transposed, plus bias[N], in `dtype`; x is quantized first if
        it is not yet. If residual[T, N] is given, the result is added to it, in place."""

    def small_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor | None = None,
        add: bool = False,
    ) -> torch.Tensor | None:
        """The product of few rows x[T, K] and weight[N, K] transposed, plus bias[N]: a new tensor, or written to
        out[T, N], or added to it with `add`. None, and nothing is done, if torch's product is to be used."""

    def gated_linear(self, x: torch.Tensor, weight: torch.Tensor, activation: str) -> torch.Tensor | None:
        """`gate` of the product of many rows x[T, K] and weight[2 I, K] transposed, by one kernel: [T, I]. None, and
        nothing is done, if two kernels are faster."""

    def int4_linear(
        self,
        x: torch.Tensor,
        weight: Int4,
        bias: torch.Tensor | None,
        batch_invariant: bool,
        out: torch.Tensor | None = None,
        add: bool = False,
    ) -> torch.Tensor:
        """The product of x[T, K] and a weight [N, K] in INT4 transposed, plus bias[N]: a new tensor, or written to
        out[T, N], or added to it with `add`. `batch_invariant`: see `linear.Linear`."""

    def lora(
        self, x: torch.Tensor, stack: Stack, rows: Rows, out: torch.Tensor, factor: float, batch_invariant: bool
    ) -> None:
        """Add factor * B(A x) of each row's adapter to out[T, N], in place, for x[T, K]. `batch_invariant`: see
        `linear.Linear`."""

    def experts(
        self, experts: Experts, x: torch.Tensor, residual: torch.Tensor, for_router: torch.Tensor | None = None
    ) -> None:  # fmt: skip
        """Add the output of a mixture of experts for x[T, hidden] to residual[T, hidden], in place. `for_router`: the
        router's input, if that is not x."""

    def mean_squares(self, qkv: torch.Tensor, num_heads: int, kv_heads: int) -> torch.Tensor:
        """float32[T, 2]: for each token of qkv[T, heads + 2 kv_heads, D], the mean of the squares of all elements of q,
        and that of k."""


class TorchOps:
    """The reference implementation of Ops."""

    @staticmethod
    def norm(
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        rounding: Rounding | None = None,
        centered: bool = False,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor | Rounded:
        out = layer_norm(x, weight, bias, eps) if centered else rms_norm(x, weight, eps)
        return out if rounding is None else rounded(out, rounding)

    @staticmethod
    def add_normed(
        x: torch.Tensor,
        after: Norm,
        residual: torch.Tensor,
        norm: Norm | NoNorm,
        scalar: torch.Tensor | None = None,
    ) -> torch.Tensor | Rounded:
        residual.add_(after(x, TorchOps()))
        if scalar is not None:
            residual.mul_(scalar)
        return norm(residual, TorchOps())

    @staticmethod
    def gate(
        x: torch.Tensor, activation: str, rounding: Rounding | None = None, up: torch.Tensor | None = None
    ) -> torch.Tensor | Rounded:
        gate, up = x.chunk(2, dim=-1) if up is None else (x, up)
        out = _ACTIVATIONS[activation](gate, up)
        return out if rounding is None else rounded(out, rounding)

    @staticmethod
    def squared_relu(x: torch.Tensor, rounding: Rounding | None = None) -> torch.Tensor | Rounded:
        out = x.relu_().square_()
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
        out = F.linear(known.dequantized(), weight.dequantized(), None if bias is None else bias.float())
        return out.to(dtype) if residual is None else residual.add_(out)

    @staticmethod
    def small_linear(*_: object) -> None:
        """Torch's product is always used."""

    @staticmethod
    def gated_linear(*_: object) -> None:
        """The product and `gate` are always separate."""

    @staticmethod
    def int4_linear(
        x: torch.Tensor,
        weight: Int4,
        bias: torch.Tensor | None,
        batch_invariant: bool,
        out: torch.Tensor | None = None,
        add: bool = False,
    ) -> torch.Tensor:
        made = Linear(weight.dequantized().to(x.dtype), bias, batch_invariant)(x)
        return made if out is None else out.add_(made) if add else out.copy_(made)

    @staticmethod
    def lora(
        x: torch.Tensor, stack: Stack, rows: Rows, out: torch.Tensor, factor: float, batch_invariant: bool
    ) -> None:
        add_by_adapter(x, stack, rows, out, factor, batch_invariant)

    @staticmethod
    def experts(
        experts: Experts, x: torch.Tensor, residual: torch.Tensor, for_router: torch.Tensor | None = None
    ) -> None:  # fmt: skip
        experts.one_by_one(x, residual, TorchOps(), for_router)

    @staticmethod
    def mean_squares(qkv: torch.Tensor, num_heads: int, kv_heads: int) -> torch.Tensor:
        q, k, _ = qkv.float().square().split((num_heads, kv_heads, kv_heads), dim=1)
        return torch.stack((q.flatten(1).mean(1), k.flatten(1).mean(1)), dim=1)


class Projected(Protocol):
    """The input of a layer's attention: queries, keys and values of T tokens, before norms and RoPE, which GPU kernels
    apply while they store K and V."""

    @property
    def cos(self) -> torch.Tensor:
        """[T, 1, rope_dim / 2]."""

    def split(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """q [T, heads, D], k [T, kv_heads, D] and v [T, kv_heads, width of V], after norms and RoPE. If attention reads
        k and v of another layer, they are None."""

    def scale_queries(self, factors: torch.Tensor) -> None:
        """Multiply q by factors[T, 1, 1], in place. RoPE is linear, so this may come before it."""

    @property
    def value_projection(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function from the weighted sums of V, [T, heads, width of V], to the heads' outputs, [T, heads, width of a
        head's value]: the identity, except in latent attention."""


@dataclass(frozen=True, slots=True)
class Heads:
    """`Projected` of grouped-query attention."""

    qkv: torch.Tensor
    """[T, heads + 2 kv_heads, D]: q, k, v."""
    num_heads: int
    norms: tuple[torch.Tensor, torch.Tensor] | None
    """Weights of the RMSNorms of q and of k, if any: [D] each, for each head alone, or with `mean_squares` [heads * D]
    and [kv_heads * D], for all heads together."""
    eps: float
    cos: torch.Tensor
    """[T, 1, rope_dim / 2], as `sin`."""
    sin: torch.Tensor
    mean_squares: torch.Tensor | None = None
    """float32[T, ranks, 2]: `Ops.mean_squares` of each rank, if all heads are normalized together."""

    def split(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, heads, D], k and v [T, kv_heads, D], after norms and RoPE."""
        kv_heads = (self.qkv.shape[1] - self.num_heads) // 2
        q, k, v = self.qkv.split((self.num_heads, kv_heads, kv_heads), dim=1)
        if self.norms is not None and self.mean_squares is not None:
            # Added rank by rank: how torch.sum rounds may depend on the shape.
            both = sum(self.mean_squares.unbind(1)) / self.mean_squares.shape[1]
            q, k = (
                rms_norm(x, weight.view(-1, x.shape[-1]), self.eps, mean[:, None, None])
                for x, weight, mean in zip((q, k), self.norms, both.unbind(1), strict=True)
            )
        elif self.norms is not None:
            q, k = rms_norm(q, self.norms[0], self.eps), rms_norm(k, self.norms[1], self.eps)
        return rotate(q, self.cos, self.sin), rotate(k, self.cos, self.sin), v

    def scale_queries(self, factors: torch.Tensor) -> None:
        assert self.norms is None, "a norm would undo it"
        self.qkv[:, : self.num_heads].mul_(factors)

    @property
    def value_projection(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return _identity


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


Product = Linear | ScaledLinear | Int4Linear | LoraLinear

Attend = Callable[[int, Projected], torch.Tensor]
"""Attention: (place of the layer among those with attention, its input) -> [T, heads, width of a head's value]. Stores
K and V in pages first."""


class Projections(Protocol):
    """The projections of a layer's hidden states to queries, keys and values."""

    def project(self, x: torch.Tensor | Rounded, cos: torch.Tensor, sin: torch.Tensor, ops: Ops) -> Projected:
        """Project normalized hidden states x[T, hidden]; cos and sin are [T, 1, rope_dim / 2]."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate the heads' outputs [T, heads, width of a head's value] for the output projection."""

    @property
    def rounding(self) -> Rounding | None:
        """How the input of `project` is to be quantized."""

    @property
    def products(self) -> list[Product]:
        """The projections that are applied to every token."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """`Projections` of grouped-query attention; q, k and v are one matrix."""

    qkv: Product
    num_heads: int
    head_dim: int
    norms: tuple[torch.Tensor, torch.Tensor] | None
    """See `Heads.norms`."""
    eps: float
    norm_all_heads: bool = False
    """One norm over all heads of q, and one over those of k; with a `group`, over the heads of all ranks."""
    group: Group | None = None
    head_norms: HeadNorms | None = None
    """Instead of `norms`: what is computed here, by torch."""
    clip: float | None = None
    """See `ModelSpec.clip_qkv`."""

    def project(self, x: torch.Tensor | Rounded, cos: torch.Tensor, sin: torch.Tensor, ops: Ops) -> Heads:
        qkv = self.qkv(x).unflatten(1, (-1, self.head_dim))
        if self.clip is not None:
            qkv.clamp_(-self.clip, self.clip)
        if self.head_norms is not None:
            cos, sin = self.head_norms.apply(qkv, self.num_heads, cos, sin)
        means = self._means(qkv, ops) if self.norm_all_heads else None
        return Heads(qkv, self.num_heads, self.norms, self.eps, cos, sin, means)

    def _means(self, qkv: torch.Tensor, ops: Ops) -> torch.Tensor:
        """See `Heads.mean_squares`. All ranks have the same number of heads. If ranks share heads of k, each head is on
        the same number of ranks, so that the mean over ranks is still the mean over heads."""
        means = ops.mean_squares(qkv, self.num_heads, (qkv.shape[1] - self.num_heads) // 2)
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
    """RMSNorm, or LayerNorm if `centered`. `rounding`: how the result is quantized, as its consumer wants."""

    weight: torch.Tensor
    eps: float
    rounding: Rounding | None
    centered: bool = False
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, ops: Ops) -> torch.Tensor | Rounded:
        return ops.norm(x, self.weight, self.eps, self.rounding, self.centered, self.bias)


@dataclass(frozen=True, slots=True)
class NoNorm:
    """The identity, for models without a norm in some place."""

    def __call__(self, x: torch.Tensor, ops: Ops) -> torch.Tensor:
        return x


@dataclass(frozen=True, slots=True)
class Output:
    """A projection back to the residual stream. In a `group`, each rank has a part of its input features, and the
    results of all ranks are added, in the buffer of `turn` (see `Group.buffer`)."""

    product: Product
    group: Group | None
    turn: int
    after: Norm | None = None
    """Norm of the result, before it is added to the residual stream."""
    factor: float = 1.0
    """Multiplies the result; ignored if there is such a norm."""

    @property
    def rounding(self) -> Rounding | None:
        """How the input is to be quantized."""
        return self.product.rounding

    def add(
        self, x: torch.Tensor | Rounded, residual: torch.Tensor, norm: Norm | NoNorm, ops: Ops
    ) -> torch.Tensor | Rounded:
        """Add the result to residual[T, hidden], in place. Returns the `norm` of the new residual."""
        if self.after is not None:
            if self.group is None:
                return ops.add_normed(self.product(x), self.after, residual, norm)
            residual.add_(self._normalized(x, residual, self.after, self.group, ops))
            return norm(residual, ops)
        if self.group is None:
            self.product.add(x, residual, self.factor)
            return norm(residual, ops)
        part = self.group.buffer(self.turn, residual)
        self.product.put(x, part)
        if self.factor != 1:
            part *= self.factor
        return self.group.add(self.turn, part, residual, norm, ops)

    def _normalized(
        self, x: torch.Tensor | Rounded, residual: torch.Tensor, after: Norm, group: Group, ops: Ops
    ) -> torch.Tensor:
        """The result [T, hidden], summed over ranks and normalized by `after`."""
        part = group.buffer(self.turn, residual)
        self.product.put(x, part)
        return group.add(self.turn, part, torch.zeros_like(residual), after, ops)


@dataclass(frozen=True, slots=True)
class Gate:
    """Multiplies the attention output by the sigmoid, or softplus, of a projection of attention's input (arXiv
    2505.06708)."""

    norm: Norm | NoNorm
    """The norm before attention. It is computed again for the gate, because only the residual stream is kept during
    attention."""
    product: Product
    """To one number per element of the attention output, or to one per head."""
    softplus: bool

    def __call__(self, attended: torch.Tensor, residual: torch.Tensor, ops: Ops) -> torch.Tensor:
        """The gated attention output [T, inner]. `residual` [T, hidden] is still that before attention."""
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
    heads: Projections | DeltaNet | ShortConv | Mamba | NoMixer
    output: Output | NoOutput
    mlp_norm: Norm | NoNorm
    mlp: Mlp | UngatedMlp | Mixture | ExpertsBeside | NoMlp
    sinks: torch.Tensor | None = None
    """float32[heads] (see `ModelSpec.sinks`)."""
    gate: Gate | None = None
    """See `ModelSpec.gate`."""
    beside: Mamba | None = None
    """A mixer with the same input as attention. The input of `output` is attention's output, and then that of this."""
    end: LayerEnd | None = None
    """What follows the MLP."""
