"""A decoder layer: what mixes its tokens, its MLP, and the norms and projections around them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from radixrt.worker.model.layers.fp8 import Activations, Fp8Scaling, plain
from radixrt.worker.model.layers.layer_inputs import LayerEnd
from radixrt.worker.model.layers.linear import Product
from radixrt.worker.model.layers.mixers import Attention, ForwardContext, LayerPlace, Mixer, identity
from radixrt.worker.model.layers.moe import sigmoid, softplus
from radixrt.worker.model.layers.norms import HeadNorms, NoNorm, Norm, rms_norm
from radixrt.worker.model.layers.ops import Ops
from radixrt.worker.model.layers.rope import rotate
from radixrt.worker.model.parallel.group import Group


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
            both = functools.reduce(torch.add, self.mean_squares.unbind(1)) / self.mean_squares.shape[1]
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
        return identity


@dataclass(frozen=True, slots=True)
class Grouped(Attention):
    """Grouped-query attention; q, k and v are one matrix."""

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

    def project(self, x: Activations, cos: torch.Tensor, sin: torch.Tensor, ops: Ops) -> Heads:
        qkv = self.qkv(x).unflatten(1, (-1, self.head_dim))
        if self.head_norms is not None:
            cos, sin = self.head_norms.apply(qkv, self.num_heads, cos, sin)
        means = self._means(qkv, ops) if self.norm_all_heads else None
        return Heads(qkv, self.num_heads, self.norms, self.eps, cos, sin, means)

    def _means(self, qkv: torch.Tensor, ops: Ops) -> torch.Tensor:
        """See `Heads.mean_squares`. All ranks have the same number of heads. If ranks share heads of k, each head is on
        the same number of ranks, so that the mean over ranks is still the mean over heads."""
        means = ops.mean_squares(qkv, self.num_heads, (qkv.shape[1] - self.num_heads) // 2)
        return (means if self.group is None else self.group.gather(means)).unflatten(1, (-1, 2))

    @property
    def fp8_scaling(self) -> Fp8Scaling | None:
        return self.qkv.fp8_scaling

    @property
    def products(self) -> list[Product]:
        return [self.qkv]


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
    def fp8_scaling(self) -> Fp8Scaling | None:
        """How the input is to be quantized."""
        return self.product.fp8_scaling

    def add(self, x: Activations, residual: torch.Tensor, norm: Norm | NoNorm, ops: Ops) -> Activations:
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

    def _normalized(self, x: Activations, residual: torch.Tensor, after: Norm, group: Group, ops: Ops) -> torch.Tensor:
        """The result [T, hidden], summed over ranks and normalized by `after`."""
        part = group.buffer(self.turn, residual)
        self.product.put(x, part)
        return plain(group.add(self.turn, part, torch.zeros_like(residual), after, ops))


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


class FeedForward(Protocol):
    """What follows attention: an MLP, experts, or both (see `mlp`, `parallel_experts`)."""

    @property
    def fp8_scaling(self) -> Fp8Scaling | None:
        """How the input is to be quantized."""

    def add(self, x: Activations, residual: torch.Tensor, norm: Norm | NoNorm, ops: Ops) -> Activations:
        """Add the output for x[T, hidden] to residual[T, hidden], in place. Returns the `norm` of the new residual."""


@dataclass(frozen=True, slots=True)
class NoMlp(FeedForward):
    """In layers that have a mixer alone."""

    @property
    def fp8_scaling(self) -> None:
        return None

    def add(self, x: Activations, residual: torch.Tensor, norm: Norm | NoNorm, ops: Ops) -> Activations:
        """Adds nothing."""
        return norm(residual, ops)


@dataclass(frozen=True, slots=True)
class NoOutput:
    """With `NoMixer`."""

    def add(self, x: Activations, residual: torch.Tensor, norm: Norm | NoNorm, ops: Ops) -> Activations:
        """Adds nothing. Returns the MLP's input."""
        return x


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """A layer adds to the residual stream what it makes of it. Each norm but the first is computed together with the
    sum that it follows:

        x = attention_norm(residual)                                      by what is before the layer
        residual += output(gate(mixer(x)));       x = mlp_norm(residual)
        residual += mlp(x), maybe an `end`;       x = next_norm(residual)
    """

    place: LayerPlace
    attention_norm: Norm | NoNorm
    mixer: Mixer
    output: Output | NoOutput
    mlp_norm: Norm | NoNorm
    mlp: FeedForward
    parallel: bool = False
    """See `ModelSpec.parallel`: the MLP's input is the norm of the residual stream before the mixer's output."""
    sinks: torch.Tensor | None = None
    """float32[heads] (see `AttentionSpec.sinks`)."""
    gate: Gate | None = None
    """See `AttentionSpec.gate`."""
    end: LayerEnd | None = None
    """What follows the MLP."""

    def forward(
        self, x: Activations, residual: torch.Tensor, next_norm: Norm | NoNorm, context: ForwardContext
    ) -> Activations:
        """From its normalized input x. Adds to residual[T, hidden], in place, and returns the `next_norm` of it, which
        is the input of what comes next."""
        inputs = None if context.inputs is None else context.inputs[:, self.place.layer]
        return self.finish(self.mix(x, context), residual, next_norm, context.ops, inputs)

    def mix(self, x: Activations, context: ForwardContext) -> Activations:
        """The first half: the outputs of the mixer's heads."""
        return self.mixer.forward(x, self.place, context)

    def finish(
        self,
        mixed: Activations,
        residual: torch.Tensor,
        next_norm: Norm | NoNorm,
        ops: Ops,
        inputs: torch.Tensor | None = None,
    ) -> Activations:
        """The second half. `inputs` [T, size]: see `layer_inputs`."""
        mixed = self.mixer.gather(mixed)
        if self.gate is not None:
            mixed = self.gate(plain(mixed), residual, ops)
        if self.parallel:
            x = self.mlp_norm(residual, ops)
            self.output.add(mixed, residual, NoNorm(), ops)
        else:
            x = self.output.add(mixed, residual, self.mlp_norm, ops)
        if self.end is None:
            return self.mlp.add(x, residual, next_norm, ops)
        self.mlp.add(x, residual, NoNorm(), ops)
        return self.end.apply(residual, inputs, next_norm, ops)
