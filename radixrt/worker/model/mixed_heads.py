"""Attention of layers whose heads differ from those of other layers: in their number, in the sizes of keys and values,
or in having no keys and values of their own (`ModelSpec.layers`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from radixrt.worker.model.layers import Ops, Product
from radixrt.worker.model.norms import HeadNorm
from radixrt.worker.model.rope import rotate
from radixrt.worker.model.scaled import Rounded, Rounding
from radixrt.worker.model.spec import LayerSpec


@dataclass(frozen=True, slots=True)
class MixedHeads:
    """`layers.Projected`, already normalized and rotated."""

    q: torch.Tensor
    k: torch.Tensor | None
    """None, as `v`: attention reads those of another layer."""
    v: torch.Tensor | None
    cos: torch.Tensor

    def split(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        return self.q, self.k, self.v

    def scale_queries(self, factors: torch.Tensor) -> None:
        self.q.mul_(factors)

    @property
    def value_projection(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return _identity


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


@dataclass(frozen=True, slots=True)
class Mixed:
    """`layers.Projections` of such a layer."""

    qkv: Product
    """To q, k and v, or what the layer has of these."""
    num_heads: int
    sizes: LayerSpec
    """Those of this rank."""
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None
    v_norm: HeadNorm | None = None
    value_factor: float = 1.0

    def project(self, x: torch.Tensor | Rounded, cos: torch.Tensor, sin: torch.Tensor, ops: Ops) -> MixedHeads:
        own, made = self.sizes, self.qkv(x)
        q_size, k_size = self.num_heads * own.head_dim, own.kv_heads * own.head_dim
        q = rotate(_normalized(made[:, :q_size].unflatten(1, (-1, own.head_dim)), self.q_norm), cos, sin)
        if own.source is not None:
            return MixedHeads(q, None, None, cos)
        k = made[:, q_size : q_size + k_size].unflatten(1, (-1, own.head_dim))
        v = k if own.tied_values else made[:, q_size + k_size :].unflatten(1, (-1, own.value_dim))
        v = _normalized(v, self.v_norm)
        if self.value_factor != 1:
            v = v * self.value_factor
        return MixedHeads(q, rotate(_normalized(k, self.k_norm), cos, sin), v, cos)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1)

    @property
    def rounding(self) -> Rounding | None:
        return self.qkv.rounding

    @property
    def products(self) -> list[Product]:
        return [self.qkv]


def _normalized(heads: torch.Tensor, norm: HeadNorm | None) -> torch.Tensor:
    return heads if norm is None else norm(heads)
