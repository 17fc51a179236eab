"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), in the form that its pages are small for.

Of a token all heads share a latent c and a rotated key r. A head's key is (U c, r) and its value is W c, so that

    (q, p) . (U c, r)  =  (U^T q, p) . (c, r)          sum of weights * W c  =  W (sum of weights * c)

and attention sees one KV head: keys (c, r), whose first elements are the values c; queries (U^T q, p). For many queries
a key it takes fewer products to multiply keys and values out first, for every head (`cuda.full_heads`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from radixrt.worker.model.layers import Norm, Ops, Product, TorchOps
from radixrt.worker.model.linear import HeadLinear
from radixrt.worker.model.rope import rotate
from radixrt.worker.model.scaled import Rounded, Rounding

NORM_EPS = 1e-6
"""Of the norms of latents, whatever `rms_norm_eps` says (transformers, `DeepseekV2RMSNorm`)."""


@dataclass(frozen=True)
class Ups:
    """What a layer multiplies latents by: products of each head's own."""

    k: HeadLinear
    """[heads, rank, what is not rotated]: U, transposed."""
    v: HeadLinear
    """[heads, width of a head's value, rank]: W."""

    @cached_property
    def columns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[rank, heads * what is not rotated], [rank, heads * width of a head's value]: of all heads in one product."""
        rank = self.v.weight.shape[2]
        return self.k.weight.transpose(1, 2).reshape(-1, rank).t(), self.v.weight.reshape(-1, rank).t()


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Projected, of latent attention: D is that of a latent and a rotated key, the width of V that of a latent."""

    q: torch.Tensor
    """[T, heads, what is not rotated, then what is]; rows may lie apart."""
    latent: torch.Tensor
    """[T, D]: the latent, then the key to be rotated; rows may lie apart."""
    ups: Ups
    norm: torch.Tensor
    """The weight of the latent's RMSNorm."""
    eps: float
    cos: torch.Tensor
    """[T, 1, half of what is rotated], and `sin` as well."""
    sin: torch.Tensor
    interleaved: bool

    @property
    def rank(self) -> int:
        """The width of V."""
        return len(self.norm)

    @property
    def rope_dim(self) -> int:
        return 2 * self.cos.shape[-1]

    @property
    def values(self) -> HeadLinear:
        return self.ups.v

    def scale_queries(self, factors: torch.Tensor) -> None:
        self.q.mul_(factors)

    def split(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q = self.q.new_empty((*self.q.shape[:2], self.latent.shape[1]))
        self.ups.k.put(self.q[..., : -self.rope_dim], q[..., : self.rank])
        q[..., self.rank :] = rotate(self.q[..., -self.rope_dim :], self.cos, self.sin, self.interleaved)
        latent, key = self.latent[:, None].split((self.rank, self.rope_dim), dim=-1)
        latent = TorchOps.norm(latent, self.norm, self.eps)
        k = torch.cat((latent, rotate(key, self.cos, self.sin, self.interleaved)), dim=-1)
        return q, k, k[..., : self.rank]


@dataclass(frozen=True, slots=True)
class Latent:
    """Projections of latent attention."""

    down: Product
    """Gives queries or what they come of, then what `LatentHeads.latent` is."""
    q_norm: Norm | None
    """None, as `q_up`, where queries come of the hidden state at once."""
    q_up: Product | None
    k_norm: torch.Tensor
    ups: Ups
    num_heads: int
    interleaved: bool

    def project(self, x: torch.Tensor | Rounded, cos: torch.Tensor, sin: torch.Tensor, ops: Ops) -> LatentHeads:
        made = self.down(x)
        width = len(self.k_norm) + 2 * cos.shape[-1]
        q, latent = made[:, :-width], made[:, -width:]
        if self.q_up is not None and self.q_norm is not None:
            q = self.q_up(self.q_norm(q.contiguous(), ops))
        q = q.unflatten(1, (self.num_heads, -1))
        return LatentHeads(q, latent, self.ups, self.k_norm, NORM_EPS, cos, sin, self.interleaved)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1)

    @property
    def rounding(self) -> Rounding | None:
        return self.down.rounding

    @property
    def products(self) -> list[Product]:
        return [self.down] if self.q_up is None else [self.down, self.q_up]
