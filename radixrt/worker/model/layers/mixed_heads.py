"""Attention of layers whose heads differ from those of other layers: in their number, in the sizes of keys and values,
or in having no keys and values of their own (`ModelSpec.layers`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from radixrt.worker.model.layers.fp8 import Activations, Fp8Scaling
from radixrt.worker.model.layers.linear import Product
from radixrt.worker.model.layers.mixers import Attention, identity
from radixrt.worker.model.layers.norms import HeadNorm
from radixrt.worker.model.layers.ops import Ops
from radixrt.worker.model.layers.rope import rotate
from radixrt.worker.model.spec.spec import LayerSpec


@dataclass(frozen=True, slots=True)
class MixedNorms:
    """RMSNorms of each head of q, k and v; None: there is none."""

    q: HeadNorm | None = None
    k: HeadNorm | None = None
    v: HeadNorm | None = None
    """Without a weight."""


@dataclass(frozen=True, slots=True)
class MixedHeads:
    """`mixers.Projected` of such a layer."""

    qkv: torch.Tensor
    """[T, heads * D + kv_heads * D + kv_heads * width of V]: q, k, v. Without v if values are tied; q alone if
    attention reads those of another layer."""
    num_heads: int
    sizes: LayerSpec
    norms: MixedNorms
    cos: torch.Tensor
    """[T, 1, rope_dim / 2], as `sin`."""
    sin: torch.Tensor

    def split(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """See `mixers.Projected`."""
        own = self.sizes
        q_size, k_size = self.num_heads * own.head_dim, own.kv_heads * own.head_dim
        q = self._rotated(self.qkv[:, :q_size], self.norms.q)
        if own.source is not None:
            return q, None, None
        k, v = self.qkv[:, q_size : q_size + k_size], self.qkv[:, q_size + k_size :]
        v = _normalized((k if own.tied_values else v).unflatten(1, (own.kv_heads, -1)), self.norms.v)
        return q, self._rotated(k, self.norms.k), v if own.value_factor == 1 else v * own.value_factor

    def scale_queries(self, factors: torch.Tensor) -> None:
        assert self.norms.q is None, "a norm would undo it"
        self.qkv[:, : self.num_heads * self.sizes.head_dim].mul_(factors[:, 0])

    @property
    def value_projection(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return identity

    def _rotated(self, x: torch.Tensor, norm: HeadNorm | None) -> torch.Tensor:
        return rotate(_normalized(x.unflatten(1, (-1, self.sizes.head_dim)), norm), self.cos, self.sin)


def _normalized(heads: torch.Tensor, norm: HeadNorm | None) -> torch.Tensor:
    return heads if norm is None else norm(heads)


@dataclass(frozen=True, slots=True)
class Mixed(Attention):
    """Attention of such a layer."""

    qkv: Product
    """To q, k and v, or what the layer has of these."""
    num_heads: int
    sizes: LayerSpec
    """Those of this rank."""
    norms: MixedNorms

    def project(self, x: Activations, cos: torch.Tensor, sin: torch.Tensor, ops: Ops) -> MixedHeads:
        return MixedHeads(self.qkv(x), self.num_heads, self.sizes, self.norms, cos, sin)

    @property
    def fp8_scaling(self) -> Fp8Scaling | None:
        return self.qkv.fp8_scaling

    @property
    def products(self) -> list[Product]:
        return [self.qkv]
