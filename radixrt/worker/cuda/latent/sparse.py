"""DeepSeek Sparse Attention of one step on a GPU (see `layers.indexer`).

    queries at positions below top_k    the kernels of latent attention, over all keys
    other queries                       index scores of all keys -> the top_k -> their slots -> the same kernels

The slots that a query attends to are a row of a page table for pages of one token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from radixrt.worker.cuda.attention import attend, variants
from radixrt.worker.cuda.attention.attention_groups import (
    AttentionGroups,
    DTypes,
    MixedAttention,
    PackedAttention,
    Works,
)
from radixrt.worker.cuda.attention.chunks import PagedStep, Sequences
from radixrt.worker.cuda.attention.pages import Pages
from radixrt.worker.cuda.attention.step import StepAttention
from radixrt.worker.cuda.attention.variants import Shape, Variant
from radixrt.worker.cuda.attention.work import Tiling
from radixrt.worker.cuda.elementwise.staging import PackedArray, Packer
from radixrt.worker.cuda.latent import latent
from radixrt.worker.cuda.latent.index_scores import KEYS, QUERIES, index_scores, make_tiles
from radixrt.worker.cuda.latent.selection import select
from radixrt.worker.execution.kv_pool import IndexPool
from radixrt.worker.execution.torch_runner import leading_decodes, ranges
from radixrt.worker.model.layers.indexer import Index
from radixrt.worker.model.layers.latent import LatentHeads
from radixrt.worker.model.layers.mixers import Attend, Projected
from radixrt.worker.plan import Plan

MAX_SCORES = 1 << 26
"""Index scores that are computed at once."""


@dataclass(frozen=True, slots=True)
class Sparse:
    """What all steps have in common: kernel and tiling of attention to selected tokens, whose pages have one token."""

    top_k: int
    page_size: int
    shape: Shape
    variant: Variant
    tiling: Tiling

    @classmethod
    def of(cls, top_k: int, shape: Shape, dtypes: DTypes, exact: bool) -> Sparse:
        """For pages of one token, of which each query has a row of its own. `shape` is that of all attention."""
        single = replace(shape, page_size=1)
        variant = variants.decode_variant(single, dtypes[0].itemsize)
        tiling = attend.best_tiling(variant, single, *dtypes, causal=True)
        if exact:
            tiling = replace(tiling, fixed=top_k)
        return cls(top_k, shape.page_size, single, variant, tiling)

    def step(self, plan: Plan, packer: Packer) -> SparseQueries | None:
        """The queries at positions of at least top_k; None if there are none."""
        positions = ranges(plan.starts, plan.counts)
        tokens = np.flatnonzero(positions >= self.top_k)
        return SparseQueries(self, plan, positions, tokens, packer) if len(tokens) else None


class SparseQueries:
    """The queries of a step that attend to the tokens that indexers select, not to all."""

    def __init__(self, sparse: Sparse, plan: Plan, positions: np.ndarray, tokens: np.ndarray, packer: Packer) -> None:
        self._sparse = sparse
        self._columns = -(-(int(positions[tokens].max()) + 1) // KEYS) * KEYS
        rows = np.repeat(plan.rows, plan.counts)[tokens]
        self._packed = packer.add(np.stack([tokens, rows, positions[tokens]], axis=1).astype(np.int32))
        owners = np.repeat(np.arange(len(plan.counts)), plan.counts)[tokens]
        self._rounds = _rounds(owners, max(1, MAX_SCORES // self._columns))
        self._packed_tiles = [packer.add(tiles) for _, _, tiles in self._rounds]
        others = np.flatnonzero(positions < sparse.top_k)
        self._packed_others: PackedArray | None = packer.add(others) if len(others) else None
        counts = np.clip(sparse.top_k - plan.starts, 0, plan.counts)
        self.dense_requests = np.flatnonzero(counts)
        """The requests with other queries, by their index in the plan."""
        self.dense_plan = replace(
            plan,
            requests=tuple(plan.requests[i] for i in self.dense_requests),
            paths=tuple(plan.paths[i] for i in self.dense_requests) if plan.paths else (),
            rows=plan.rows[self.dense_requests],
            starts=plan.starts[self.dense_requests],
            counts=counts[self.dense_requests].astype(np.int32),
        )
        """The plan of the other queries alone; what it says of tokens and logits has no meaning."""
        each, count = np.full(len(tokens), sparse.top_k - 1), len(tokens)
        sequences = Sequences(np.arange(count), each, np.ones(count, dtype=np.int64), tokens)
        self._attention = PagedStep(sequences, {None}, packer, sparse.shape, sparse.variant, sparse.tiling)
        self._slots: torch.Tensor | None = None

    def sent(self, integers: torch.Tensor) -> None:
        """Called with the packed integers on the device."""
        self._queries = self._packed.of(integers)
        self._tiles = [tiles.of(integers) for tiles in self._packed_tiles]
        others = self._packed_others
        self.others = None if others is None else others.of(integers).view(torch.int64)[:, 0]
        """Indices of the other queries, int64; None if there are none."""
        self._attention.sent(integers)

    def select(self, index: Index, keys: torch.Tensor, table: torch.Tensor) -> None:
        """Select the tokens that are attended to from now on, by the index keys [slots, dim] of a layer."""
        q, weights = (x.contiguous() for x in index.queries())
        slots = q.new_empty((len(self._queries), self._sparse.top_k), dtype=torch.int32)
        for (begin, end, _), tiles in zip(self._rounds, self._tiles, strict=True):
            scores = q.new_empty((end - begin, self._columns), dtype=torch.float32)
            index_scores(q, weights, keys, table, self._queries, tiles, scores, self._sparse.page_size, begin)
            select(scores, self._queries, table, slots[begin:end], self._sparse.page_size, begin)
        self._slots = slots

    def attend(self, pages: Pages, q: torch.Tensor, out: torch.Tensor) -> None:
        """Write the attention of these queries among q[T, heads, D] to out[T, heads, rank]."""
        assert self._slots is not None, "the first layer has an indexer"
        self._attention.run(q, replace(pages, table=self._slots), out)


def _rounds(owners: np.ndarray, at_once: int) -> list[tuple[int, int, np.ndarray]]:
    """Queries of the requests owners[S] whose scores are computed at once: (begin, end, their tiles)."""
    at_once = at_once // QUERIES * QUERIES or at_once
    tiles = make_tiles(owners, at_once)
    begins = range(0, len(owners), at_once)
    cuts = np.searchsorted(tiles[:, 0], begins)[1:]
    return [
        (begin, min(begin + at_once, len(owners)), part)
        for begin, part in zip(begins, np.split(tiles, cuts), strict=True)
    ]


class SparseAttention:
    """The attention of a step. `dense` is that of the queries that attend to all tokens; `queries` are the others, if
    there are any."""

    def __init__(
        self, pages: Callable[[int], Pages], index: IndexPool, slots: torch.Tensor,
        dense: StepAttention | MixedAttention, queries: SparseQueries | None,
    ) -> None:  # fmt: skip
        self._pages = pages
        self._index = index
        self._slots = slots
        self._wide_slots = slots.long()
        self._dense = dense
        self._queries = queries

    def __call__(self, layer: int, heads: Projected) -> torch.Tensor:
        assert isinstance(heads, LatentHeads)
        pages, queries = self._pages(layer), self._queries
        if heads.index is not None:
            number = heads.index.indexer.number
            self._index.write(number, self._wide_slots, heads.index.keys())
            if queries is not None:
                queries.select(heads.index, self._index.layer(number), pages.table)
        q = latent.append(pages, heads, self._slots)
        out = heads.q.new_empty((*q.shape[:2], heads.rank))
        if queries is None:
            self._dense.over_pages(layer, q, out)
        else:
            queries.attend(pages, q, out)
            if queries.others is not None:
                some = heads.q.new_empty((len(queries.others), *out.shape[1:]))
                self._dense.over_pages(layer, q[queries.others], some)
                out[queries.others] = some
        return heads.ups.v(out)


@dataclass(frozen=True, slots=True)
class PackedSparse:
    """A step's attention, planned and packed (see `PackedAttention`)."""

    dense: PackedAttention
    queries: SparseQueries | None
    index: IndexPool

    def sent(self, pages: Callable[[int], Pages], slots: torch.Tensor, integers: torch.Tensor) -> Attend:
        """See `PlannedStep.sent`."""
        dense = self.dense.kinds.attention([step.sent(pages, slots, integers) for step in self.dense.steps])
        if self.queries is not None:
            self.queries.sent(integers)
        return SparseAttention(pages, self.index, slots, dense, self.queries)


@dataclass(frozen=True, slots=True)
class SparseKinds:
    """Takes the place of `AttentionGroups.pack` in models with indexers."""

    kinds: AttentionGroups
    sparse: Sparse
    index: IndexPool

    def pack(
        self, plan: Plan, decodes: int, works: list[Works] | None, packer: Packer, parity: int, narrow: bool
    ) -> PackedSparse:
        queries = self.sparse.step(plan, packer)
        if queries is not None:
            plan, decodes = queries.dense_plan, leading_decodes(queries.dense_plan)
        return PackedSparse(self.kinds.pack(plan, decodes, works, packer, parity, narrow), queries, self.index)
