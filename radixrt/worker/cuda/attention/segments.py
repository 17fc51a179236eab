"""FA3 over prefixes that sequences share, and over long prefixes of few queries, divided into parts.

FA3 computes 128 queries of a head on one multiprocessor and does not split keys. So a prefix that requests share is
computed as one sequence that has the queries of all of them, and is cut into parts if that fills the chip:

    shared prefix of 16k, 32 tails of 128:   [   part: 4,096 queries   |   part: 4,096 queries   ]   and each tail,
    causal
    one prefix of 16k, 128 queries:  [ part | part | part | part | part | part ]             and its tail, causal

A query has a copy and a partial result in each part that it is in. Partial results are merged by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from radixrt.worker.cuda.attention import attend
from radixrt.worker.cuda.attention.chunks import Sequences
from radixrt.worker.cuda.attention.pages import Pages
from radixrt.worker.cuda.attention.ragged import FlashInfer
from radixrt.worker.cuda.attention.variants import Shape
from radixrt.worker.cuda.elementwise import kernels
from radixrt.worker.cuda.elementwise.staging import Packer
from radixrt.worker.execution.prefix_sharing import Cost, Path, Sharing, find_sharing, with_sharers
from radixrt.worker.execution.torch_runner import ranges

FA3_QUERIES = 128
MAX_PARTS = 16
SHORTEST_PART = 512
"""The fewest keys of a part."""
PART_COST = 300
"""Fixed cost of a part, in keys."""

MAX_COPIES = 3
"""The most copies of a query, on average."""
PREFIXES, TAILS, SHARED_PREFIXES = 1 << 16, 1 << 17, 1 << 18
"""Numbers of FlashInfer's wrappers (see `FlashInfer.wrapper`), beyond those that `RaggedStep` uses."""


# ---------------------------------------------------------------- planning


@dataclass(frozen=True, slots=True)
class Chip:
    """The chip that FA3 has to fill: each multiprocessor (there are `num_sms`) computes a tile of one of `heads` at a
    time."""

    heads: int
    num_sms: int

    def cut(self, queries: np.ndarray, keys: np.ndarray) -> tuple[int, float]:
        """The best part length for N segments of int[N] queries and keys. Returns (keys of a part, time). Time is in
        keys of one round: the chip computes the parts in rounds, and a part takes the time of its keys plus
        PART_COST."""
        tiles = -(-queries // FA3_QUERIES) * self.heads
        goals = -(-int(keys.max()) // np.arange(1, MAX_PARTS + 1))
        goals = goals[: max(1, int((goals >= SHORTEST_PART).sum()))]
        parts = tiles @ -(-keys[:, None] // goals)
        times = np.maximum(-(-parts // self.num_sms) * (tiles @ keys / parts + PART_COST), goals + PART_COST)
        best = int(times.argmin())
        return int(goals[best]), float(times[best])


def cut_segments(sharing: Sharing, rows: np.ndarray, goal: int, chosen: Sequence[int] | np.ndarray) -> np.ndarray:
    """Divide the `chosen` segments into parts of at most `goal` keys. Returns int64[P, 5]: row of the page table, first
    key, end of the keys, first place in `sharing.order`, number of places."""
    begin, end, first, count = (sharing.segments[chosen, i] for i in range(4))
    parts = -(-(end - begin) // goal)
    length = -(-(end - begin) // parts)
    of = np.repeat(np.arange(len(parts)), parts)
    at = begin[of] + ranges(np.zeros_like(parts), parts) * length[of]
    row = rows.astype(np.int64)[sharing.order[first]][of]
    return np.stack([row, at, np.minimum(at + length[of], end[of]), first[of], count[of]], axis=1)


@dataclass(frozen=True, slots=True)
class Cut:
    """What a SegmentStep computes: the `chosen` chunks of a step, int64; what they share; the most keys of a part."""

    chosen: np.ndarray
    sharing: Sharing
    goal: int


def cut_shared(
    paths: Sequence[Path], sequences: Sequences, shape: Shape, itemsize: int, chip: Chip, room: int, fewest: int
) -> Cut | None:
    """The chunks that share prefixes, if that pays; otherwise None. `paths` are the tree paths before each chunk.
    `room`: keys that fit the workspace; `itemsize`: bytes of an element of the pages; `fewest`: the fewest pairs of a
    query and a key that must be shared."""
    if len(paths) < 2:
        return None
    # A shared key is gathered only once, but each query under it has one more copy and partial result, which are read
    # or written seven times in all (bench/attention.py: 16 tails of 512 tokens on 4,096 do not pay).
    width = shape.kv_heads * shape.head_dim
    each = int(sequences.counts.sum()) // len(paths)
    cost = Cost(2 * width * (itemsize + 2), 7 * 2 * each * shape.heads * shape.head_dim, len(paths))
    all_sharing = find_sharing(paths, cost)
    if not len(all_sharing.segments):
        return None
    chosen, sharing = with_sharers(all_sharing)
    part = sequences.take(chosen)
    counts = part.counts.astype(np.int64)
    begin, end, first, places = sharing.segments.T
    before = np.concatenate([[0], np.cumsum(counts[sharing.order])])
    queries, keys = before[first + places] - before[first], end - begin
    tails = part.starts.astype(np.int64) + counts - sharing.own
    fits = keys.sum() + tails.sum() <= room and queries.sum() <= MAX_COPIES * counts.sum()
    if not fits or int((queries * keys).sum()) < fewest:
        return None
    return Cut(chosen, sharing, chip.cut(queries, keys)[0])


def cut_alone(sequences: Sequences, chip: Chip, room: int) -> Cut | None:
    """Chunks whose long prefixes are divided, because otherwise most of the chip would be idle; None if that does not
    pay."""
    starts, counts = sequences.starts.astype(np.int64), sequences.counts.astype(np.int64)
    if starts.min() < SHORTEST_PART or int((starts + counts).sum()) > room:
        return None
    goal, _ = chip.cut(counts, starts)
    if goal >= starts.max():
        return None
    places = np.arange(len(starts))
    segments = np.stack([np.zeros_like(starts), starts, places, np.ones_like(starts)], axis=1)
    return Cut(places, Sharing(places, segments, starts), goal)


# ---------------------------------------------------------------- steps


class SharedKeys:
    """Attention over parts of prefixes, each with the queries of all sequences under it; all keys are visible to them.
    With `own`, also causal attention over each sequence's own keys, from position own[b] on."""

    def __init__(
        self, parts: np.ndarray, order: np.ndarray, sequences: Sequences, packer: Packer, flashinfer: FlashInfer,
        parity: int, shape: Shape, own: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """`parts` are from `cut_segments`: their places are indices into `order`, which has indices of `sequences`.
        `own` is int64[B]."""
        self._flashinfer = flashinfer
        self._shape = shape
        row, begin, end, first, count = parts.T
        counts = sequences.counts.astype(np.int64)
        keys, members = end - begin, order[ranges(first, count)]
        of = np.repeat(np.arange(len(parts)), count)
        queries = [ranges(sequences.queries[members], counts[members])]
        numbers = SHARED_PREFIXES if own is None else PREFIXES
        self._runs = [_Run(flashinfer.wrapper(parity, numbers), len(queries[0]), int(keys.sum()))]
        each = np.bincount(of, counts[members], len(parts)).astype(np.int64)
        flashinfer.plan(self._runs[0].wrapper, each, keys, None, causal=False)
        if own is not None:
            tails = sequences.starts.astype(np.int64) + counts - own
            queries.append(ranges(sequences.queries, counts))
            self._runs.append(_Run(flashinfer.wrapper(parity, TAILS), len(queries[1]), int(tails.sum())))
            flashinfer.plan(self._runs[1].wrapper, counts, tails, None)
            row, begin, keys = (np.concatenate(x) for x in ((row, sequences.rows), (begin, own), (keys, tails)))
        where = np.stack([row, begin, keys, np.cumsum(keys) - keys], axis=1).astype(np.int32)
        self._where, self._longest, self._keys = packer.add(where), int(keys.max()), int(keys.sum())
        self.queries = np.concatenate(queries)
        """int64[copies]: which query of the step each copy is of."""
        self._copies = packer.add(self.queries.astype(np.int32))
        self._cache = shape.kernel_cache()

    def sent(self, integers: torch.Tensor) -> None:
        """Take what was packed, on the device."""
        self._where_there, self._copies_there = self._where.of(integers), self._copies.of(integers)
        size = (len(self.queries), self._shape.heads, self._shape.head_dim)
        values = torch.empty(size, dtype=self._flashinfer.workspace[0].dtype, device=integers.device)
        lse = torch.empty(size[:2], dtype=torch.float32, device=integers.device)
        self._partials = values, lse
        copies, keys = 0, 0
        for run in self._runs:
            run.out, run.lse = values[copies : copies + run.copies], lse[copies : copies + run.copies]
            run.k, run.v = (x[keys : keys + run.keys] for x in self._flashinfer.workspace)
            copies, keys = copies + run.copies, keys + run.keys

    def run(self, q: torch.Tensor, pages: Pages) -> attend.Partials:
        """The partial results of the copies of q[T, heads, D]. Does little on the host, since it runs for every
        layer."""
        k, v = (x[: self._keys] for x in self._flashinfer.workspace)
        kernels.gather(
            pages.keys, pages.values, pages.table, self._shape.page_size, self._where_there, self._longest, (k, v),
            pages.scales, self._cache,
        )  # fmt: skip
        rows = q.index_select(0, self._copies_there)
        begin = 0
        for run in self._runs:
            mine = rows[begin : begin + run.copies]
            run.wrapper.run(mine, run.k, run.v, out=run.out, lse=run.lse, return_lse=True)
            begin += run.copies
        return self._partials


@dataclass(slots=True)
class _Run:
    """One launch of FlashInfer: its numbers of query copies and of keys, and its views of the workspace, which `sent`
    sets."""

    wrapper: Any
    """FlashInfer's, which has no types."""
    copies: int
    keys: int
    k: torch.Tensor = field(init=False)
    v: torch.Tensor = field(init=False)
    out: torch.Tensor = field(init=False)
    lse: torch.Tensor = field(init=False)


class SegmentStep:
    """A ChunkStep over shared or long prefixes and each sequence's own keys, merged. For layers without windows."""

    def __init__(
        self, sequences: Sequences, cut: Cut, packer: Packer, flashinfer: FlashInfer, parity: int, shape: Shape
    ) -> None:
        """For the chunks that `cut` chooses."""
        self._shape = shape
        sequences, sharing = sequences.take(cut.chosen), cut.sharing
        parts = cut_segments(sharing, sequences.rows, cut.goal, np.arange(len(sharing.segments)))
        self._keys = SharedKeys(parts, sharing.order, sequences, packer, flashinfer, parity, shape, own=sharing.own)
        self._merges, self._entries = (packer.add(x) for x in _merges(self._keys.queries))
        self._cache = shape.kernel_cache()

    def sent(self, integers: torch.Tensor) -> None:
        self._keys.sent(integers)
        self._merges_there, self._entries_there = self._merges.of(integers), self._entries.of(integers)

    def run(self, q: torch.Tensor, pages: Pages, out: torch.Tensor) -> None:
        partials = self._keys.run(q, pages)
        attend.merge(
            partials, self._merges_there, self._entries_there, out, self._shape, sinks=pages.sinks, cache=self._cache
        )


def _merges(queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(int32[M, 3], int32 entries) as in `work.Merges`, which merge all copies of each query. int64 queries[copies] are
    the queries of the copies."""
    entries = np.argsort(queries, kind="stable")
    times = np.bincount(queries)
    which = np.flatnonzero(times)
    counts = times[which]
    merges = np.stack([which, np.cumsum(counts) - counts, counts], axis=1)
    return merges.astype(np.int32), entries.astype(np.int32)
