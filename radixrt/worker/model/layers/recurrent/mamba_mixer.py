"""A layer's Mamba-2 mixer (arXiv 2405.21060): a projection, a short convolution, a state-space model, a gated norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from radixrt.worker.model.layers.fp8 import Activations, Fp8Scaling
from radixrt.worker.model.layers.linear import Product
from radixrt.worker.model.layers.mixers import Recurrence, RecurrentMixer
from radixrt.worker.model.layers.moe import softplus
from radixrt.worker.model.layers.recurrent.delta import short_conv
from radixrt.worker.model.layers.recurrent.mamba import gated, state_space
from radixrt.worker.model.parallel.group import Group
from radixrt.worker.model.spec.mamba_spec import MambaSpec


@dataclass(frozen=True, slots=True)
class Mamba(RecurrentMixer):
    """A Mamba-2 mixer. In a `group`, each rank has a part of its heads, which `spec` describes."""

    spec: MambaSpec
    projection: Product
    """To z, the gate; to x, B and C, which are convolved; and to the time steps, one number per head."""
    conv: torch.Tensor
    """[channels, kernel]"""
    conv_bias: torch.Tensor | None
    """[channels]"""
    rates: torch.Tensor
    """float32[heads]: negative; times a time step, they are the logarithm of the decay."""
    skip: torch.Tensor
    """float32[heads]"""
    step_bias: torch.Tensor
    """float32[heads]"""
    norm: torch.Tensor | None
    """[values]; None: there is only a gate."""
    eps: float
    exact: bool
    """Results must not depend on how sequences are cut into steps."""
    group: Group | None = None

    def mix(self, x: Activations, number: int, states: Recurrence) -> torch.Tensor:
        """[T, values]."""
        spec, (convs, rules) = self.spec, states.layer(number)
        z, xbc, step = self.projection(x).split((spec.values, spec.channels, spec.heads), dim=1)
        xbc = short_conv(xbc, self.conv, self.conv_bias, convs, states.slots, states.bounds, to=states.to)
        inner, b, c = xbc.split(spec.conv_sizes, dim=1)
        inner = inner.unflatten(1, (spec.heads, -1))
        b, c = (part.unflatten(1, (spec.groups, -1)) for part in (b, c))
        steps = self.steps(step)
        out = state_space(
            inner, steps, self.rates, b, c, self.skip, rules, states.slots, states.bounds, self.exact, states.to
        )
        over_ranks = self.over_ranks if spec.group_ranks > 1 else None
        return gated(out.flatten(1), z, self.norm, spec.groups, self.eps, spec.norm == "before_gate", over_ranks)

    def over_ranks(self, mine: torch.Tensor) -> torch.Tensor:
        """float32[T, ranks]: the numbers of all ranks that share this rank's group of heads, its own ones being
        mine[T, 1]. A collective of all ranks."""
        assert self.group is not None
        count = self.spec.group_ranks
        first = self.group.shard.rank // count * count
        return self.group.gather(mine)[:, first : first + count]

    def steps(self, step: torch.Tensor) -> torch.Tensor:
        """Time steps float32[T, heads] of their projection [T, heads]."""
        wide = step.float() + self.step_bias
        return (F.softplus(wide) if wide.is_cuda else softplus(wide)).clamp(*self.spec.limits)

    @property
    def fp8_scaling(self) -> Fp8Scaling | None:
        return self.projection.fp8_scaling

    @property
    def products(self) -> list[Product]:
        return [self.projection]
