"""Sizes of the indexer of DeepSeek Sparse Attention."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """An indexer selects the tokens that a query attends to (see `indexer`)."""

    heads: int
    """Index queries of a token (`index_n_heads`); they share the token's index key."""
    dim: int
    """Elements of an index query, and of an index key (`index_head_dim`). RoPE rotates the first ones."""
    top_k: int
    """The most tokens that a query attends to (`index_topk`)."""
    interleaved: bool
    """See `LatentSpec.interleaved`: RoPE of index queries and keys may differ from that of attention."""
    layers: tuple[int, ...]
    """The layers with an indexer. The others attend to the tokens that the last one before them has selected."""
