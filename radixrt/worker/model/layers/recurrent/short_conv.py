"""A layer with a gated short convolution in place of attention (LFM2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radixrt.worker.model.layers.fp8 import Activations, Fp8Scaling
from radixrt.worker.model.layers.linear import Product
from radixrt.worker.model.layers.mixers import Recurrence, RecurrentMixer
from radixrt.worker.model.layers.recurrent.delta import short_conv


@dataclass(frozen=True, slots=True)
class ShortConv(RecurrentMixer):
    """A gated short convolution in place of attention."""

    product: Product
    """To b, c and x: c * conv(b * x) is projected back."""
    conv: torch.Tensor
    """[channels, kernel]"""
    bias: torch.Tensor | None
    """[channels], of the convolution."""

    def mix(self, x: Activations, number: int, states: Recurrence) -> torch.Tensor:
        """[T, channels]."""
        b, c, inner = self.product(x).chunk(3, dim=1)
        convs, _ = states.layer(number)
        return c * short_conv(b * inner, self.conv, self.bias, convs, states.slots, states.bounds, None, states.to)

    @property
    def fp8_scaling(self) -> Fp8Scaling | None:
        return self.product.fp8_scaling

    @property
    def products(self) -> list[Product]:
        return [self.product]
