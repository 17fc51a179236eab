"""DeepSeek Sparse Attention of one step on a GPU (see `model.indexer`).

    queries at positions below top_k    the kernels of latent attention, over all keys
    other queries                       index scores of all keys -> the top_k -> their slots -> the same kernels

The slots that a query attends to are a row of a page table for pages of one token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import triton
import triton.language as tl

from radixrt.worker.cuda import latent, launching
from radixrt.worker.cuda.chunks import PagedStep, Pages, Sequences
from radixrt.worker.cuda.launching import wait
from radixrt.worker.cuda.staging import PackedArray, Packer
from radixrt.worker.cuda.step import StepAttention
from radixrt.worker.cuda.variants import Shape, Variant
from radixrt.worker.cuda.work import Tiling
from radixrt.worker.kv import IndexPool
from radixrt.worker.model.indexer import Index
from radixrt.worker.model.latent import LatentHeads
from radixrt.worker.model.sparse import HIGHEST
from radixrt.worker.plan import Plan
from radixrt.worker.runner import ranges

KEYS = 128
"""Keys of a tile of index scores."""
MOST_SCORES = 1 << 26
"""Index scores that are computed at once."""


# ---------------------------------------------------------------- index scores


@triton.jit(do_not_specialize=["stride", "columns"])
def _index_scores_kernel(
    q_ptr, weights_ptr, keys_ptr, table_ptr, queries_ptr, out_ptr, stride, columns, HEADS: tl.constexpr,
    DIM: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
    FINITE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    number = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, KEYS)
    key = tl.program_id(1) * KEYS + n
    query = tl.load(queries_ptr + 3 * number).to(tl.int64)
    row = tl.load(queries_ptr + 3 * number + 1).to(tl.int64)
    position = tl.load(queries_ptr + 3 * number + 2)
    out_at = out_ptr + number * columns + key
    if tl.program_id(1) * KEYS > position:
        tl.store(out_at, tl.full([KEYS], -float("inf"), tl.float32), mask=key < columns)
    else:
        h = tl.arange(0, ROWS)
        d = tl.arange(0, WIDTH)
        # Lanes past the query's own key read it again: the keys beyond are another request's and may be NaN.
        known = tl.minimum(key, position)
        if PAGE == 1:
            slot = tl.load(table_ptr + row * stride + known).to(tl.int64)
        else:
            slot = tl.load(table_ptr + row * stride + known // PAGE).to(tl.int64) * PAGE + known % PAGE
        k = tl.load(keys_ptr + (slot * DIM)[:, None] + d[None, :], mask=(d < DIM)[None, :], other=0.0)
        real = (h < HEADS)[:, None] & (d < DIM)[None, :]
        q = tl.load(q_ptr + ((query * HEADS + h) * DIM)[:, None] + d[None, :], mask=real, other=0.0)
        weights = tl.load(weights_ptr + query * HEADS + h, mask=h < HEADS, other=0.0)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        # Not tl.maximum, which drops NaN.
        scores = tl.sum(tl.where(products < 0, 0.0, products) * weights[:, None], 0)
        scores = tl.where(scores == scores, scores, FINITE)
        tl.store(out_at, tl.where(key <= position, scores, -float("inf")), mask=key < columns)


def index_scores(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, table: torch.Tensor, queries: torch.Tensor,
    columns: int, page_size: int,
) -> torch.Tensor:  # fmt: skip
    """float32[S, columns]: the index scores of S queries, each an entry of int32 queries[S, 3]: (its index among
    q[T, heads, dim] and float32 weights[T, heads], its row of the page table, its position). Those of keys after a
    query are -inf; of keys that are not finite, HIGHEST. `keys` [slots, dim] are a layer's pages."""
    _, heads, dim = q.shape
    out = torch.empty((len(queries), columns), dtype=torch.float32, device=q.device)
    rows, width = (max(16, triton.next_power_of_2(x)) for x in (heads, dim))
    launching.launch(
        _index_scores_kernel, (len(queries), triton.cdiv(columns, KEYS), 1), None,
        q, weights, keys, table, queries, out, table.stride(0), columns, heads, dim, page_size, rows, width, KEYS,
        HIGHEST, num_warps=8,
    )  # fmt: skip
    return out


def slots_of(table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """int32[S, K]: the slots of tokens at int64 positions[S, K] of int64 rows[S] of the page table."""
    if page_size == 1:
        return table[rows[:, None], positions].contiguous()
    return (table[rows[:, None], positions // page_size] * page_size + positions % page_size).int().contiguous()


# ---------------------------------------------------------------- a step


@dataclass(frozen=True, slots=True)
class Sparse:
    """What all steps have in common: kernel and tiling of attention to selected tokens, whose pages have one token."""

    top_k: int
    page_size: int
    shape: Shape
    variant: Variant
    tiling: Tiling
    exact: bool

    def step(self, plan: Plan, packer: Packer) -> SparseQueries | None:
        """The queries at positions of at least top_k; None if there are none."""
        positions = ranges(plan.starts, plan.counts)
        tokens = np.flatnonzero(positions >= self.top_k)
        return SparseQueries(self, plan, positions, tokens, packer) if len(tokens) else None


class SparseQueries:
    """The queries of a step that attend to the tokens that indexers select, not to all."""

    def __init__(self, sparse: Sparse, plan: Plan, positions: np.ndarray, tokens: np.ndarray, packer: Packer) -> None:
        rows = np.repeat(plan.rows, plan.counts)[tokens]
        self._sparse = sparse
        self._columns = -(-(int(positions[tokens].max()) + 1) // KEYS) * KEYS
        self._packed = packer.add(np.stack([tokens, rows, positions[tokens]], axis=1).astype(np.int32))
        others = np.flatnonzero(positions < sparse.top_k)
        self._packed_others: PackedArray | None = packer.add(others) if len(others) else None
        counts = np.clip(sparse.top_k - plan.starts, 0, plan.counts)
        self.dense_requests = np.flatnonzero(counts)
        """The requests with other queries, by their index in the plan."""
        self.dense_plan = replace(
            plan,
            requests=tuple(plan.requests[i] for i in self.dense_requests),
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
        self._rows = self._queries[:, 1].long()
        others = self._packed_others
        self.others = None if others is None else others.of(integers).view(torch.int64)[:, 0]
        """Indices of the other queries, int64; None if there are none."""
        self._attention.sent(integers)

    def select(self, index: Index, keys: torch.Tensor, table: torch.Tensor) -> None:
        """Select the tokens that are attended to from now on, by the index keys [slots, dim] of a layer."""
        (q, weights), sparse, found = index.queries(), self._sparse, []
        q, weights = q.contiguous(), weights.contiguous()
        each = max(1, MOST_SCORES // self._columns)
        for queries, rows in zip(self._queries.split(each), self._rows.split(each), strict=True):
            scores = index_scores(q, weights, keys, table, queries, self._columns, sparse.page_size)
            positions = scores.topk(sparse.top_k, dim=1, sorted=False).indices
            if sparse.exact:  # the order in which topk returns them may depend on the columns
                positions = positions.sort(1).values
            found.append(slots_of(table, rows, positions, sparse.page_size))
        self._slots = torch.cat(found)

    def attend(self, pages: Pages, q: torch.Tensor, out: torch.Tensor) -> None:
        """Write the attention of these queries among q[T, heads, D] to out[T, heads, rank]."""
        assert self._slots is not None, "the first layer has an indexer"
        self._attention.run(q, replace(pages, table=self._slots), out)


class SparseAttention:
    """The attention of a step. `dense` is that of the queries that attend to all tokens; `queries` are the others, if
    there are any."""

    def __init__(
        self, pages: Callable[[int], Pages], index: IndexPool, slots: torch.Tensor, dense: StepAttention,
        queries: SparseQueries | None,
    ) -> None:  # fmt: skip
        self._pages = pages
        self._index = index
        self._slots = slots
        self._wide_slots = slots.long()
        self._dense = dense
        self._queries = queries

    def __call__(self, layer: int, heads: LatentHeads) -> torch.Tensor:
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
