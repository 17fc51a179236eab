"""DeepSeek Sparse Attention of steps of decodes alone. Which tokens are selected, and of how many, only the device
needs to know, so these steps can be captured as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import triton

from radixrt.worker.cuda.chunks import Pages
from radixrt.worker.cuda.decodes import Cuts, DecodePlanner, DecodeWork, Room
from radixrt.worker.cuda.index_scores import KEYS, index_scores
from radixrt.worker.cuda.selection import select
from radixrt.worker.cuda.sparse import Sparse, SparseAttention
from radixrt.worker.cuda.step import Kernels, StepAttention
from radixrt.worker.cuda.work import Tiling
from radixrt.worker.kv import IndexPool
from radixrt.worker.model.indexer import Index
from radixrt.worker.plan import Plan

PROGRAMS = 1024
"""Programs that the index scores of a step are divided among, if there are as many keys."""


class SparseDecodes:
    """What all steps have in common. Nothing that requests share is read once: each attends to tokens of its own.

    `pages` is by layer; `tiling` is for queries of which each sees all keys of its items."""

    def __init__(self, sparse: Sparse, tiling: Tiling, pages: Callable[[int], Pages], index: IndexPool) -> None:
        self.compiled = Kernels(sparse.shape, sparse.variant, sparse.variant)
        self.cuts = Cuts(tiling, tiling, None)
        self.planner = DecodePlanner({None}, self.cuts)
        self._sparse = sparse
        self._pages = pages
        self._index = index

    def plan(self, plan: Plan, room: Room | None) -> dict[int | None, DecodeWork]:
        """The attention work of a step. The rows of its page table are the decodes."""
        rows = np.arange(len(plan.requests), dtype=np.int32)
        return self.planner.plan(plan.requests, rows, plan.starts.clip(max=self._sparse.top_k - 1), room)

    def attention(
        self, step: StepAttention, slots: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, columns: int
    ) -> SparseAttention:
        """The attention of decodes at int32 `positions` [B], with int32 `rows` [B] of the page table. `step` has the
        work of `plan`. There are up to `columns` tokens, a multiple of 16."""
        decodes = Decodes(self._sparse, step, rows, positions, columns)
        return SparseAttention(self._pages, self._index, slots, step, decodes)


class Decodes:
    """The queries of a step (see `sparse.Selecting`)."""

    others = None  # all attend to what is selected, if only to all tokens

    def __init__(
        self, sparse: Sparse, step: StepAttention, rows: torch.Tensor, positions: torch.Tensor, columns: int
    ) -> None:
        number = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
        self._sparse = sparse
        self._step = step
        self._queries = torch.stack((number, rows, positions), dim=1)
        self._tiles = torch.stack((number, torch.ones_like(number)), dim=1)
        self._scores = torch.empty((len(rows), columns), dtype=torch.float32, device=rows.device)
        self._slots = number.new_empty((len(rows), sparse.top_k))

    def select(self, index: Index, keys: torch.Tensor, table: torch.Tensor) -> None:
        q, weights = (x.contiguous() for x in index.queries())
        page_size, parts = self._sparse.page_size, triton.cdiv(PROGRAMS, len(self._queries))
        index_scores(q, weights, keys, table, self._queries, self._tiles, self._scores, page_size, parts=parts)
        select(self._scores, self._queries, table, self._slots, page_size)

    def attend(self, layer: int, pages: Pages, q: torch.Tensor, out: torch.Tensor) -> None:
        self._step.over_pages(layer, q, out, self._slots)


def columns_for(tokens: int) -> int:
    """The columns of the scores of queries that see up to `tokens` tokens."""
    return triton.cdiv(tokens, KEYS) * KEYS
