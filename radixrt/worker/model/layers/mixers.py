"""What mixes the tokens of sequences in a layer: attention, something with a recurrent state in its place, both side by
side, or nothing. Pages and states are not known here: functions that read and write them come with each step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from radixrt.worker.model.layers.fp8 import Activations, Fp8Scaling, plain
from radixrt.worker.model.layers.linear import Product
from radixrt.worker.model.layers.ops import Ops


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


def identity(x: torch.Tensor) -> torch.Tensor:
    return x


Attend = Callable[[int, Projected], torch.Tensor]
"""Attention: (place of the layer among those with attention, its input) -> [T, heads, width of a head's value]. Stores
K and V in pages first."""
Mix = Callable[[int, "RecurrentMixer", Activations], torch.Tensor]
"""What has a recurrent state in place of attention: (place of the layer among those that have, its parameters,
normalized hidden states [T, hidden]) -> the heads' outputs [T, value_heads, value_dim], or [T, channels]. Updates the
states of the step's sequences. On a GPU it is that of `cuda.recurrent.delta_step`."""


@dataclass(frozen=True, slots=True)
class Recurrence:
    """`Mix` in torch, for the states of a step's sequences."""

    layer: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    """The states of a linear layer, by its place among these: those of its convolution and of its delta rule."""
    slots: torch.Tensor
    """int64[B]"""
    bounds: torch.Tensor
    """int64[B + 1]"""
    to: torch.Tensor | None = None
    """int64[B]: slots that the states are written to, if not to those that they are read from."""

    def __call__(self, number: int, net: RecurrentMixer, x: Activations) -> torch.Tensor:
        return net.mix(x, number, self)


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What layers need to know of a step's tokens, beside the residual stream."""

    ops: Ops
    attend: Attend
    mix: Mix | None
    """None if there are no recurrent layers."""
    rotations: list[tuple[torch.Tensor, torch.Tensor]]
    """By kind of RoPE: cos and sin, [T, 1, rope_dim / 2] (see `positions.Positions`)."""
    query_factors: torch.Tensor | None
    """Factors [T, 1, 1] of queries, in layers that scale them."""
    inputs: torch.Tensor | None
    """[T, layers, size], if layers have inputs (see `layer_inputs`)."""


class LayerPlace(NamedTuple):
    """Where a layer is."""

    layer: int
    """Its number."""
    number: int
    """Its place among the layers with attention, or among those with a recurrent state. If layers have both, it is the
    same in both."""
    rope: int
    """Its kind of RoPE."""
    scales_queries: bool


class Mixer(ABC):
    """What mixes the tokens of sequences in a layer."""

    @abstractmethod
    def forward(self, x: Activations, place: LayerPlace, context: ForwardContext) -> Activations:
        """The outputs of heads for normalized hidden states x[T, hidden]: [T, heads, width], or [T, channels]."""

    @abstractmethod
    def gather(self, x: Activations) -> Activations:
        """Concatenate the outputs of heads for the output projection."""

    @property
    @abstractmethod
    def fp8_scaling(self) -> Fp8Scaling | None:
        """How the input of `forward` is to be quantized."""

    @property
    @abstractmethod
    def products(self) -> list[Product]:
        """The projections that are applied to every token."""


class Attention(Mixer):
    """Attention, by projections of hidden states to queries, keys and values."""

    @abstractmethod
    def project(self, x: Activations, cos: torch.Tensor, sin: torch.Tensor, ops: Ops) -> Projected:
        """Project normalized hidden states x[T, hidden]; cos and sin are [T, 1, rope_dim / 2]."""

    def forward(self, x: Activations, place: LayerPlace, context: ForwardContext) -> torch.Tensor:
        cos, sin = context.rotations[place.rope]
        heads = self.project(x, cos, sin, context.ops)
        if place.scales_queries and context.query_factors is not None:
            heads.scale_queries(context.query_factors)
        return context.attend(place.number, heads)

    def gather(self, x: Activations) -> torch.Tensor:
        return plain(x).flatten(1)


class RecurrentMixer(Mixer):
    """What has a recurrent state in place of attention, or beside it."""

    @abstractmethod
    def mix(self, x: Activations, number: int, states: Recurrence) -> torch.Tensor:
        """`Mix` in torch."""

    def forward(self, x: Activations, place: LayerPlace, context: ForwardContext) -> torch.Tensor:
        assert context.mix is not None
        return context.mix(place.number, self, x)

    def gather(self, x: Activations) -> torch.Tensor:
        return plain(x).flatten(1)


@dataclass(frozen=True, slots=True)
class HybridMixer(Mixer):
    """Both, with the same input. The input of the output projection is attention's output, and then that of the
    other."""

    attention: Attention
    recurrent: RecurrentMixer

    def forward(self, x: Activations, place: LayerPlace, context: ForwardContext) -> torch.Tensor:
        attended = self.attention.gather(self.attention.forward(x, place, context))
        return torch.cat((attended, self.recurrent.forward(x, place, context)), dim=1)

    def gather(self, x: Activations) -> Activations:
        return x

    @property
    def fp8_scaling(self) -> Fp8Scaling | None:
        return self.attention.fp8_scaling

    @property
    def products(self) -> list[Product]:
        return [*self.attention.products, *self.recurrent.products]


@dataclass(frozen=True, slots=True)
class NoMixer(Mixer):
    """In layers that have an MLP alone: passes on the normalized input of the layer, which is that of the MLP."""

    def forward(self, x: Activations, place: LayerPlace, context: ForwardContext) -> Activations:
        return x

    def gather(self, x: Activations) -> Activations:
        return x

    @property
    def fp8_scaling(self) -> None:
        return None

    @property
    def products(self) -> list[Product]:
        return []
