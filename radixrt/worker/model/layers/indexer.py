"""The indexer of DeepSeek Sparse Attention (DeepSeek-V3.2-Exp, section 2.1).

A query at position t attends only to the top_k of its t + 1 tokens with the highest index scores, or to all if there
are no more. The score of the token at position s is

    I(t, s)  =  sum over index heads h of  w_h(t) relu(q_h(t) . k(s))

with index queries q, projected from the query latent, an index key k and weights w, projected from hidden states. The
key is normalized by LayerNorm. DeepSeek's own code multiplies queries and keys by a Hadamard matrix before they are
rounded to FP8; that changes no product, and here they are not rounded to FP8. Its constant factors of scores are left
out, since only their order matters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from radixrt.worker.model.layers.fp8 import Activations
from radixrt.worker.model.layers.linear import Linear, Product
from radixrt.worker.model.layers.rope import rotate

NORM_EPS = 1e-6
"""Epsilon of the norm of index keys (DeepSeek's own code; transformers)."""


@dataclass(frozen=True, slots=True)
class Indexer:
    """A layer's indexer. In a group, all ranks have the whole of it: each needs all selected tokens for its heads."""

    number: int
    """Its place among the layers with an indexer."""
    q: Product
    """From the normalized query latent."""
    k: Product
    """From hidden states, as `weights`."""
    weights: Linear
    """float32 [heads, hidden]."""
    norm: tuple[torch.Tensor, torch.Tensor]
    """Weight and bias of the norm of keys, float32[dim]."""
    heads: int
    interleaved: bool


@dataclass(frozen=True, slots=True)
class Index:
    """The input of a layer's indexer, for T tokens. Queries are computed only if they are needed."""

    indexer: Indexer
    x: torch.Tensor
    """Normalized hidden states [T, hidden]."""
    latent: Activations
    """Normalized query latents [T, q_rank]."""
    cos: torch.Tensor
    """[T, 1, rope_dim / 2], as `sin`."""
    sin: torch.Tensor

    def keys(self) -> torch.Tensor:
        """[T, dim]."""
        made = self.indexer.k(self.x)
        weight, bias = self.indexer.norm
        k = F.layer_norm(made.float(), weight.shape, weight, bias, NORM_EPS).to(made.dtype)
        return rotate(k[:, None], self.cos, self.sin, self.indexer.interleaved)[:, 0]

    def queries(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Index queries [T, heads, dim] and their weights, float32[T, heads]."""
        q = self.indexer.q(self.latent).unflatten(1, (self.indexer.heads, -1))
        weights = self.indexer.weights(self.x.float())
        return rotate(q, self.cos, self.sin, self.indexer.interleaved), weights
