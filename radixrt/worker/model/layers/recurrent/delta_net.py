"""A layer's linear attention (arXiv 2412.06464): projections, a short convolution, the gated delta rule, a gated
norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from radixrt.worker.model.layers.fp8 import Activations, Fp8Scaling
from radixrt.worker.model.layers.linear import Product
from radixrt.worker.model.layers.mixers import Recurrence, RecurrentMixer
from radixrt.worker.model.layers.moe import sigmoid, softplus
from radixrt.worker.model.layers.recurrent.delta import gated_delta, gated_norm, short_conv
from radixrt.worker.model.spec.delta_spec import DeltaSpec


@dataclass(frozen=True, slots=True)
class DeltaNet(RecurrentMixer):
    """Linear attention."""

    spec: DeltaSpec
    qkvz: Product
    """To q, k, v, which are convolved, and z, the gate; with `ups`, to what decay and z are projected from."""
    ba: Product
    """To beta and what the decay is made of, one number each per head of v; with `ups`, to beta alone."""
    conv: torch.Tensor
    """[channels, kernel]"""
    rates: torch.Tensor
    """float32[value_heads]: negative; multiplies the softplus that is the decay."""
    dt_bias: torch.Tensor
    """float32[value_heads], or with `ups` float32[keys]"""
    norm: torch.Tensor
    """[value_dim]"""
    eps: float
    exact: bool
    """Results must not depend on how sequences are cut into steps."""
    ups: tuple[Product, Product] | None = None
    """The second steps of the projections to decays and z, if these have two (`DeltaSpec.rank`)."""

    def mix(self, x: Activations, number: int, states: Recurrence) -> torch.Tensor:
        """[T, value_heads, value_dim]."""
        spec, (convs, rules) = self.spec, states.layer(number)
        qkv, rest = self.qkvz(x).tensor_split((spec.channels,), dim=1)
        qkv = short_conv(qkv, self.conv, None, convs, states.slots, states.bounds, to=states.to)
        q, k, v = qkv.split((spec.keys, spec.keys, spec.values), dim=1)
        q, k = (part.unflatten(1, (spec.key_heads, spec.key_dim)) for part in (q, k))
        beta, decay, z = self.gates(x, rest)
        v, z = (part.unflatten(1, (spec.value_heads, spec.value_dim)) for part in (v, z))
        out = gated_delta(q, k, v, decay, beta, rules, states.slots, states.bounds, self.exact, states.to)
        return gated_norm(out, z, self.norm, self.eps, "sigmoid" if self.ups else "silu")

    def gates(self, x: Activations, rest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """float32[T, value_heads]: beta; the logarithm of the decay, the same or [T, value_heads, key_dim]; and z
        [T, values]. `rest`: what `qkvz` gives beside q, k and v."""
        made = self.ba(x).float()
        if self.ups is None:
            z, (b, a), rates = rest, made.chunk(2, dim=1), self.rates
        else:
            f, z = (up(part.contiguous()) for up, part in zip(self.ups, rest.chunk(2, dim=1), strict=True))
            a, b, rates = f.float(), made, self.rates[:, None]
        a = a + self.dt_bias
        beta, a = (b.sigmoid(), F.softplus(a)) if a.is_cuda else (sigmoid(b), softplus(a))
        if self.ups is not None:
            a = a.unflatten(1, (self.spec.value_heads, -1))
        return self.spec.beta_factor * beta, rates * a, z

    @property
    def fp8_scaling(self) -> Fp8Scaling | None:
        return self.qkvz.fp8_scaling if self.qkvz.fp8_scaling is self.ba.fp8_scaling else None

    @property
    def products(self) -> list[Product]:
        return [self.qkvz, self.ba, *(self.ups or ())]


def qkvz_order(spec: DeltaSpec) -> torch.Tensor:
    """The rows of q, k, v and z in a projection whose rows are grouped by head of k (`DeltaSpec.fused`)."""
    values = spec.values // spec.key_heads
    return _ungrouped(spec, (spec.key_dim, spec.key_dim, values, values))


def ba_order(spec: DeltaSpec) -> torch.Tensor:
    """As `qkvz_order`, of b and a."""
    heads = spec.value_heads // spec.key_heads
    return _ungrouped(spec, (heads, heads))


def _ungrouped(spec: DeltaSpec, sizes: tuple[int, ...]) -> torch.Tensor:
    rows = torch.arange(spec.key_heads * sum(sizes)).view(spec.key_heads, -1)
    return torch.cat([part.flatten() for part in rows.split(sizes, dim=1)])
