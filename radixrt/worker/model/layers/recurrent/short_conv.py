"""A layer with a gated short convolution in place of attention (LFM2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from radixrt.worker.model.layers.recurrent.delta import short_conv

if TYPE_CHECKING:
    from radixrt.worker.model.layers.fp8 import Fp8Activations, Fp8Scaling
    from radixrt.worker.model.layers.layers import Product
    from radixrt.worker.model.layers.recurrent.delta_net import Recurrence


@dataclass(frozen=True, slots=True)
class ShortConv:
    """Takes the place of `layers.Projections`, as `delta_net.DeltaNet` does."""

    product: Product
    """To b, c and x: c * conv(b * x) is projected back."""
    conv: torch.Tensor
    """[channels, kernel]"""
    bias: torch.Tensor | None
    """[channels], of the convolution."""

    def mix(self, x: torch.Tensor | Fp8Activations, number: int, states: Recurrence) -> torch.Tensor:
        """As `DeltaNet.mix`: [T, channels]."""
        b, c, x = self.product(x).chunk(3, dim=1)
        convs, _ = states.layer(number)
        return c * short_conv(b * x, self.conv, self.bias, convs, states.slots, states.bounds, None, states.to)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """As `Projections.gather`."""
        return x

    @property
    def fp8_scaling(self) -> Fp8Scaling | None:
        """How the input of `mix` is to be quantized."""
        return self.product.fp8_scaling

    @property
    def products(self) -> list[Product]:
        """The projections that are applied to every token."""
        return [self.product]
