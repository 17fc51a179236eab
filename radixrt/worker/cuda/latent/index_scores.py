"""Index scores of DeepSeek Sparse Attention (the formula is in `layers.indexer`): of tiles of queries of one sequence,
so that keys are loaded once for all queries of a tile."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.attention.variants import room
from radixrt.worker.cuda.elementwise import launching
from radixrt.worker.cuda.elementwise.launching import wait
from radixrt.worker.model.layers.sparse import HIGHEST

QUERIES, TOGETHER = 64, 2
"""The most queries of a tile, and how many of them are multiplied at once where there is room."""
KEYS, WARPS, STAGES = 128, 4, 2
RESERVED = 2048
"""Bytes of shared memory for all but keys and queries."""
QUERY_FIELDS, TILE_FIELDS = 3, 2


@triton.jit
def _keys(keys_ptr, table_at, known, d, DIM: tl.constexpr, PAGE: tl.constexpr):
    """The index keys [KEYS, WIDTH] of the tokens at positions `known`."""
    if PAGE == 1:
        slot = tl.load(table_at + known).to(tl.int64)
    else:
        slot = tl.load(table_at + known // PAGE).to(tl.int64) * PAGE + known % PAGE
    return tl.load(keys_ptr + (slot * DIM)[:, None] + d[None, :], mask=(d < DIM)[None, :], other=0.0)


@triton.jit(do_not_specialize=["first", "stride"])
def _index_scores_kernel(
    q_ptr, weights_ptr, keys_ptr, table_ptr, queries_ptr, tiles_ptr, out_ptr, first, stride, columns,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    TOGETHER: tl.constexpr, KEYS: tl.constexpr, FINITE: tl.constexpr, QUERY_FIELDS: tl.constexpr,
    TILE_FIELDS: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    tile = tiles_ptr + tl.program_id(0) * TILE_FIELDS
    begin, count = tl.load(tile), tl.load(tile + 1)
    query = queries_ptr + begin * QUERY_FIELDS
    token = tl.load(query).to(tl.int64)
    row = tl.load(query + 1).to(tl.int64)
    position = tl.load(query + 2)
    length = position + count
    key = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    if tl.program_id(1) * KEYS < length:
        r = tl.arange(0, TOGETHER * ROWS)
        d = tl.arange(0, WIDTH)
        u = tl.arange(0, TOGETHER)
        # Lanes past the last key read it again: the keys beyond are another request's and may be NaN.
        k = _keys(keys_ptr, table_ptr + row * stride, tl.minimum(key, length - 1), d, DIM, PAGE)
        out_at = out_ptr + (begin - first).to(tl.int64) * columns + key[:, None]
        for j in tl.range(0, count, TOGETHER, num_stages=STAGES):
            own = j + r // ROWS
            h = r % ROWS
            real = (h < HEADS) & (own < count)
            at = (token + own) * HEADS + h
            q = tl.load(q_ptr + (at * DIM)[:, None] + d[None, :], mask=real[:, None] & (d < DIM)[None, :], other=0.0)
            weights = tl.load(weights_ptr + at, mask=real, other=0.0)
            products = tl.dot(k, tl.trans(q), input_precision="ieee")
            products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL) * weights[None, :]
            scores = tl.sum(tl.reshape(products, [KEYS, TOGETHER, ROWS]), 2)
            scores = tl.where(scores == scores, scores, FINITE)
            one = j + u[None, :]
            seen = (key[:, None] <= position + one) & (one < count)
            tl.store(out_at + one.to(tl.int64) * columns, scores, mask=seen)


def make_tiles(owners: np.ndarray, at_once: int) -> np.ndarray:
    """int32[N, 2]: tiles (first query, count) of queries that belong to the requests owners[S], one run of queries for
    each. A tile has up to QUERIES of one request, and none has queries from before and after a multiple of
    `at_once`."""
    index = np.arange(len(owners))
    begins = np.flatnonzero(np.diff(owners, prepend=-1))
    offset = index - np.repeat(begins, np.diff(begins, append=len(owners)))
    starts = np.flatnonzero((offset % QUERIES == 0) | (index % at_once == 0))
    return np.stack([starts, np.diff(starts, append=len(owners))], axis=1).astype(np.int32)


def together(rows: int, width: int, itemsize: int) -> int:
    """How many queries of `rows` heads and `width` elements of so many bytes are multiplied at once: TOGETHER if they
    and a tile's keys fit a program's shared memory, else one. Other GPUs than those of data centers have 99 KiB."""
    return TOGETHER if (KEYS + TOGETHER * rows) * width * itemsize + RESERVED <= room() else 1


def index_scores(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, table: torch.Tensor, queries: torch.Tensor,
    tiles: torch.Tensor, out: torch.Tensor, page_size: int, first: int = 0,
) -> None:  # fmt: skip
    """Write the index scores of queries to float32 `out` [S, columns], from the query `first` on; those of keys after
    a query are not written, and those of keys that are not finite are HIGHEST.

    int32 queries[:, 3]: (index among q[T, heads, dim] and float32 weights[T, heads], row of the page table, position).
    int32 tiles[N, 2]: see `make_tiles`; the queries of a tile follow one another in q and by position. `keys`
    [slots, dim] are a layer's pages."""
    _, heads, dim = q.shape
    rows, width = (max(16, triton.next_power_of_2(x)) for x in (heads, dim))
    launching.launch(
        _index_scores_kernel, (len(tiles), triton.cdiv(out.shape[1], KEYS), 1), None,
        q, weights, keys, table, queries, tiles, out, first, table.stride(0), out.shape[1], heads, dim, page_size,
        rows, width, together(rows, width, q.element_size()), KEYS, HIGHEST, QUERY_FIELDS, TILE_FIELDS, STAGES,
        num_warps=WARPS,
    )  # fmt: skip
