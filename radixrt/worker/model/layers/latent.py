"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), in the absorbed form.

For each token, all heads share a latent c and a rotated key r. A head's key is (U c, r) and its value is W c, where U
and W are the head's up-projections. With a query (q, p) of unrotated and rotated elements,

    (q, p) . (U c, r)  =  (U^T q, p) . (c, r)          sum of weights * W c  =  W (sum of weights * c)

so that attention sees one KV head, with keys (c, r), whose first elements are the values c, and queries (U^T q, p); and
pages hold only (c, r). If there are many queries per key, it is cheaper to expand keys and values for every head first
(`cuda.latent.full_heads`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from radixrt.worker.model.layers.fp8 import Activations, Fp8Scaling, plain
from radixrt.worker.model.layers.indexer import Index, Indexer
from radixrt.worker.model.layers.linear import HeadLinear, Product
from radixrt.worker.model.layers.mixers import Attention
from radixrt.worker.model.layers.norms import Norm, rms_norm
from radixrt.worker.model.layers.ops import Ops
from radixrt.worker.model.layers.rope import rotate

NORM_EPS = 1e-6
"""Epsilon of the norms of latents, whatever `rms_norm_eps` says (transformers, `DeepseekV2RMSNorm`)."""


@dataclass(frozen=True)
class UpProjections:
    """Up-projections from the latent to the keys and values of each head."""

    k: HeadLinear
    """U, transposed: [heads, rank, nope_dim]."""
    v: HeadLinear
    """W: [heads, value_dim, rank]."""

    @cached_property
    def columns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(U, W) of all heads side by side: [rank, heads * nope_dim] and [rank, heads * value_dim], to expand latents
        in one product each."""
        rank = self.v.weight.shape[2]
        return self.k.weight.transpose(1, 2).reshape(-1, rank).t(), self.v.weight.reshape(-1, rank).t()


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """`mixers.Projected` of latent attention, in the absorbed form: D is rank + rope_dim, and V has rank elements."""

    q: torch.Tensor
    """[T, heads, nope_dim + rope_dim], not yet rotated; rows need not be contiguous."""
    latent: torch.Tensor
    """[T, rank + rope_dim]: the latent, not yet normalized, and the shared key, not yet rotated; rows need not be
    contiguous."""
    ups: UpProjections
    norm: torch.Tensor
    """The weight of the latent's RMSNorm."""
    eps: float
    cos: torch.Tensor
    """[T, 1, rope_dim / 2], as `sin`."""
    sin: torch.Tensor
    interleaved: bool
    index: Index | None = None
    """The input of the layer's indexer, if it has one."""

    @property
    def rank(self) -> int:
        """Elements of the latent."""
        return len(self.norm)

    @property
    def rope_dim(self) -> int:
        return 2 * self.cos.shape[-1]

    @property
    def value_projection(self) -> HeadLinear:
        return self.ups.v

    def scale_queries(self, factors: torch.Tensor) -> None:
        self.q.mul_(factors)

    def split(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q = self.q.new_empty((*self.q.shape[:2], self.latent.shape[1]))
        self.ups.k.put(self.q[..., : -self.rope_dim], q[..., : self.rank])
        q[..., self.rank :] = rotate(self.q[..., -self.rope_dim :], self.cos, self.sin, self.interleaved)
        latent, key = self.latent[:, None].split((self.rank, self.rope_dim), dim=-1)
        latent = rms_norm(latent, self.norm, self.eps)
        k = torch.cat((latent, rotate(key, self.cos, self.sin, self.interleaved)), dim=-1)
        return q, k, k[..., : self.rank]


@dataclass(frozen=True, slots=True)
class Latent(Attention):
    """Latent attention."""

    down: Product
    """Projects hidden states to the query latent, or to queries if there is no such latent, and to
    `LatentHeads.latent`, side by side."""
    q_norm: Norm | None
    """Norm of the query latent. None, as `q_up`, if there is none."""
    q_up: Product | None
    k_norm: torch.Tensor
    ups: UpProjections
    num_heads: int
    interleaved: bool
    indexer: Indexer | None = None

    def project(self, x: Activations, cos: torch.Tensor, sin: torch.Tensor, ops: Ops) -> LatentHeads:
        made = self.down(x)
        width = len(self.k_norm) + 2 * cos.shape[-1]
        q, latent = made[:, :-width], made[:, -width:]
        index = None
        if self.q_up is not None and self.q_norm is not None:
            q_latent = self.q_norm(q.contiguous(), ops)
            q = self.q_up(q_latent)
            if self.indexer is not None:
                index = Index(self.indexer, plain(x), q_latent, cos, sin)
        q = q.unflatten(1, (self.num_heads, -1))
        return LatentHeads(q, latent, self.ups, self.k_norm, NORM_EPS, cos, sin, self.interleaved, index)

    @property
    def fp8_scaling(self) -> Fp8Scaling | None:
        """None if there is an indexer: its weights need hidden states that are not quantized."""
        return self.down.fp8_scaling if self.indexer is None else None

    @property
    def products(self) -> list[Product]:
        found = [self.down] if self.q_up is None else [self.down, self.q_up]
        return found if self.indexer is None else [*found, self.indexer.q, self.indexer.k]
