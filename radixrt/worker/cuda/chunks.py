"""Attention of chunks: many new tokens after what is cached.

Two ways. The kernel of `attend` reads pages in place and splits keys over the chip: best for few queries. FlashInfer's
FA3 wants K and V side by side in the activations' dtype: cached pages are widened into a workspace first, which costs
their bytes once a layer and gains most of the tensor cores' speed. FA3 does not split keys, so few queries after a long
prefix would leave most of the chip idle: then the prefix is cut here, into sequences of their own, and merged.

    128 queries, 16,384 cached:  [ part | part | part | ... | tail, causal ]   each with a copy of the queries
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import numpy as np
import torch

from radixrt.worker.cuda import attend, kernels
from radixrt.worker.cuda.attend import Scratch, Shape, Variant
from radixrt.worker.cuda.staging import Packer, Piece
from radixrt.worker.cuda.work import Tiling, make_items, make_merges, sequence_tiles

log = logging.getLogger("radixrt.cuda")

FA3_QUERIES = 128
MOST_PARTS = 16
SHORTEST_PART = 512
"""Keys of a prefix's part."""
PART_COST = 300
"""What a part costs however short it is, in keys."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """Chunks of a step, by sequence: int[B] each."""

    rows: np.ndarray
    starts: np.ndarray
    """Positions of the first new tokens."""
    counts: np.ndarray
    queries: np.ndarray
    """Where their new tokens lie among the step's."""

    def take(self, chosen: np.ndarray) -> Sequences:
        return Sequences(self.rows[chosen], self.starts[chosen], self.counts[chosen], self.queries[chosen])

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class Pages:
    """K and V of one layer, [slots, kv_heads, D], the page table int32[rows, pages], and what K and V are times."""

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    scales: tuple[float, float]
    window: int | None


class ChunkStep(Protocol):
    """The attention of one step's chunks."""

    def sent(self, integers: torch.Tensor) -> None:
        """What was packed is on the device."""

    def run(self, q: torch.Tensor, pages: Pages, out: torch.Tensor) -> None:
        """Write the attention of the chunks' tokens among q[T, heads, D] to out[T, heads, D]."""


# ---------------------------------------------------------------- over pages, in place


class PagedStep:
    """See the module; by work lists, one for each kind of layer."""

    def __init__(
        self,
        sequences: Sequences,
        windows: set[int | None],
        packer: Packer,
        shape: Shape,
        variant: Variant,
        cut: Tiling,
    ) -> None:
        self._shape = shape
        self._variant = variant
        self._pieces: dict[int | None, tuple[Piece, Piece, Piece]] = {}
        self._partials = 1
        for window in windows:
            tiles = sequence_tiles(
                sequences.rows, sequences.starts, sequences.counts, sequences.queries, window, cut.queries
            )
            items, _ = make_items(tiles, cut)
            merges = make_merges([items])
            self._pieces[window] = packer.add(items), packer.add(merges.queries), packer.add(merges.entries)
            self._partials = max(self._partials, merges.partials)

    def sent(self, integers: torch.Tensor) -> None:
        self._lists = {window: tuple(x.of(integers) for x in pieces) for window, pieces in self._pieces.items()}
        self._scratch = Scratch.make(self._partials, self._shape, integers.device)

    def run(self, q: torch.Tensor, pages: Pages, out: torch.Tensor) -> None:
        items, merges, entries = self._lists[pages.window]
        attend.attend(
            q, pages.keys, pages.values, pages.table, items, out, self._scratch, self._shape, self._variant,
            window=pages.window, causal=True, scales=pages.scales,
        )  # fmt: skip
        attend.merge(self._scratch.values, self._scratch.lse, merges, entries, out, self._shape)


# ---------------------------------------------------------------- FlashInfer


class FlashInfer:
    """FlashInfer's ragged prefill kernels, and the workspace they read K and V from.

    A wrapper keeps what was planned in pinned memory that the device reads later; so each is planned again only in the
    step after next, when the step that used it has ended. RuntimeError where the kernels cannot be built."""

    WORKSPACE = 256 << 20
    """Bytes."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, tokens: int, backend: str) -> None:
        self._flashinfer = load_flashinfer()
        self._shape = shape
        self._dtype = dtype
        self._backend = backend
        self._buffer = torch.empty(self.WORKSPACE, dtype=torch.uint8, device=device)
        self.tokens = tokens
        """That K and V of a group of sequences may have together."""
        size = (tokens, shape.kv_heads, shape.head_dim)
        self.workspace = torch.empty(size, dtype=dtype, device=device), torch.empty(size, dtype=dtype, device=device)
        self._wrappers: dict[tuple[int, int], object] = {}

    def try_out(self, windows: set[int | None]) -> None:
        """Build the kernels and run them once. Any exception says that they cannot be used."""
        shape = self._shape
        counts = np.array([3, 130])
        q = torch.zeros((133, shape.heads, shape.head_dim), dtype=self._dtype, device=self._buffer.device)
        k, v = (x[:400].zero_() for x in self.workspace)
        for window in windows:
            wrapper = self.wrapper(0, 0)
            self.plan(wrapper, counts, np.array([100, 300]), window)
            wrapper.run(q, k, v, out=torch.empty_like(q))  # type: ignore[attr-defined]
        torch.cuda.synchronize(self._buffer.device)

    def wrapper(self, parity: int, number: int) -> object:
        """The `number`-th of a step, of two for even and odd steps."""
        key = parity, number
        if key not in self._wrappers:
            self._wrappers[key] = self._flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
                self._buffer, kv_layout="NHD", backend=self._backend
            )
        return self._wrappers[key]

    def plan(
        self, wrapper: object, counts: np.ndarray, keys: np.ndarray, window: int | None, causal: bool = True
    ) -> None:
        """Sequences with `counts` queries that are the last of `keys` keys (or see all of them, if not `causal`), from
        host arrays: nothing is waited for."""
        shape = self._shape
        wrapper.plan(  # type: ignore[attr-defined]
            qo_indptr=_starts(counts),
            kv_indptr=_starts(keys),
            num_qo_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim_qk=shape.head_dim,
            causal=causal,
            window_left=-1 if window is None else window - 1,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )


def load_flashinfer() -> ModuleType:
    """FlashInfer; RuntimeError where it is not installed or does not work."""
    try:
        import flashinfer
    except Exception as error:  # it looks for compilers and libraries when imported
        raise RuntimeError(f"FlashInfer cannot be imported: {error}") from error
    return flashinfer


def _starts(counts: np.ndarray) -> torch.Tensor:
    """int32[n + 1] on the host: where each of n pieces begins, and where the last ends."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))


class RaggedStep:
    """See the module; the sequences in groups that the workspace holds."""

    def __init__(
        self, sequences: Sequences, windows: set[int | None], packer: Packer, flashinfer: FlashInfer, parity: int,
        page_size: int,
    ) -> None:  # fmt: skip
        self._flashinfer = flashinfer
        self._page_size = page_size
        self._groups: list[tuple[slice, Piece, int, int, dict[int | None, object]]] = []
        number = 0
        ends = sequences.starts.astype(np.int64) + sequences.counts
        for group in _groups(ends, sequences, flashinfer.tokens):
            part = sequences.take(group)
            keys = ends[group]
            where = np.stack([part.rows, np.zeros_like(keys), keys, np.cumsum(keys) - keys], axis=1).astype(np.int32)
            wrappers: dict[int | None, object] = {}
            for window in windows:
                wrappers[window] = flashinfer.wrapper(parity, number)
                flashinfer.plan(wrappers[window], part.counts, keys, window)
                number += 1
            first = int(part.queries[0])
            queries = slice(first, first + int(part.counts.sum()))
            self._groups.append((queries, packer.add(where), int(keys.max()), int(keys.sum()), wrappers))

    def sent(self, integers: torch.Tensor) -> None:
        self._sent = integers

    def run(self, q: torch.Tensor, pages: Pages, out: torch.Tensor) -> None:
        for queries, piece, longest, total, wrappers in self._groups:
            k, v = (x[:total] for x in self._flashinfer.workspace)
            kernels.gather(
                pages.keys, pages.values, pages.table, self._page_size, piece.of(self._sent), longest, (k, v),
                pages.scales,
            )  # fmt: skip
            wrappers[pages.window].run(q[queries], k, v, out=out[queries])  # type: ignore[attr-defined]


class SplitStep:
    """See the module; for few queries after long prefixes, without windows. The workspace must hold all keys."""

    def __init__(
        self,
        sequences: Sequences,
        parts: np.ndarray,
        packer: Packer,
        flashinfer: FlashInfer,
        parity: int,
        shape: Shape,
    ) -> None:
        """`parts`[B]: into how many each prefix is cut, at least one; new tokens are the tail."""
        self._flashinfer = flashinfer
        self._shape = shape
        counts = sequences.counts.astype(np.int64)
        keys = sequences.starts.astype(np.int64) + counts
        where = np.stack([sequences.rows, np.zeros_like(keys), keys, np.cumsum(keys) - keys], axis=1).astype(np.int32)
        self._where, self._longest, self._total = packer.add(where), int(keys.max()), int(keys.sum())
        # K and V of a sequence lie in the workspace as its parts and its tail, one after the other: both kernels see
        # all of it as sequences, the prefixes' kernel with no queries for the tails, the tails' with none for the rest.
        order = np.repeat(np.arange(len(counts)), parts + 1)
        tail = np.cumsum(parts + 1) - 1
        size = np.repeat(sequences.starts // parts, parts + 1).astype(np.int64)
        size[tail - 1] += sequences.starts % parts
        size[tail] = counts
        is_tail = np.zeros(len(order), dtype=bool)
        is_tail[tail] = True
        queries = counts[order]
        self._prefixes, self._tails = flashinfer.wrapper(parity, _SPLIT), flashinfer.wrapper(parity, _SPLIT + 1)
        flashinfer.plan(self._prefixes, np.where(is_tail, 0, queries), size, None, causal=False)
        flashinfer.plan(self._tails, np.where(is_tail, queries, 0), size, None)
        self._prefix_rows = int(queries[~is_tail].sum())
        # Copies of the queries: those of all parts first, those of the tails after them.
        copies = [_ranges(sequences.queries[order[chosen]], queries[chosen]) for chosen in (~is_tail, is_tail)]
        self._copies = packer.add(np.concatenate(copies).astype(np.int32))
        merges, entries = _split_merges(sequences, parts, self._prefix_rows)
        self._merges, self._entries = packer.add(merges), packer.add(entries)

    def sent(self, integers: torch.Tensor) -> None:
        self._where_there = self._where.of(integers)
        self._copies_there = self._copies.of(integers)
        self._merges_there, self._entries_there = self._merges.of(integers), self._entries.of(integers)
        rows = len(self._copies_there)
        dtype = self._flashinfer.workspace[0].dtype
        size = (rows, self._shape.heads, self._shape.head_dim)
        self._values = torch.empty(size, dtype=dtype, device=integers.device)
        self._lse = torch.empty(size[:2], dtype=torch.float32, device=integers.device)

    def run(self, q: torch.Tensor, pages: Pages, out: torch.Tensor) -> None:
        k, v = (x[: self._total] for x in self._flashinfer.workspace)
        kernels.gather(
            pages.keys, pages.values, pages.table, self._shape.page_size, self._where_there, self._longest, (k, v),
            pages.scales,
        )  # fmt: skip
        copies, cut = q.index_select(0, self._copies_there), self._prefix_rows
        for wrapper, rows in ((self._prefixes, slice(0, cut)), (self._tails, slice(cut, None))):
            wrapper.run(  # type: ignore[attr-defined]
                copies[rows], k, v, out=self._values[rows], lse=self._lse[rows], return_lse=True
            )
        attend.merge(self._values, self._lse, self._merges_there, self._entries_there, out, self._shape)


_SPLIT = 1 << 16
"""Wrappers from this number on are those of SplitStep."""


def _split_merges(sequences: Sequences, parts: np.ndarray, prefix_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(int32[queries, 3], int32 entries), see `work.Merges`: of each query its copies, of the parts and of the tail."""
    counts = sequences.counts.astype(np.int64)
    within = _ranges(np.zeros(len(counts), dtype=np.int64), counts)
    firsts = np.cumsum(parts * counts) - parts * counts
    times = np.repeat(parts + 1, counts)
    begins = np.cumsum(times) - times
    of = np.repeat(np.arange(len(within)), times)
    part = np.arange(len(of)) - begins[of]
    copies = (np.repeat(firsts, counts) + within)[of] + part * np.repeat(counts, counts)[of]
    entries = np.where(part == times[of] - 1, prefix_rows + of, copies)
    merges = np.stack([_ranges(sequences.queries.astype(np.int64), counts), begins, times], axis=1)
    return merges.astype(np.int32), entries.astype(np.int32)


def split_parts(sequences: Sequences, heads: int, processors: int) -> np.ndarray:
    """int64[B]: into how many parts prefixes are cut, zeros if they had better not be.

    FA3 computes 128 queries of a head on one multiprocessor. The time of n parts is that of the rounds in which the
    chip takes them, each as long as a part and what a part costs however short it is."""
    starts = sequences.starts.astype(np.int64)
    tiles = int((-(-sequences.counts.astype(np.int64) // FA3_QUERIES)).sum()) * heads
    parts = np.arange(1, MOST_PARTS + 1)
    times = -(-tiles * parts // processors) * (starts.mean() / parts + PART_COST)
    best = int(parts[times.argmin()])
    if best == 1:
        return np.zeros(len(starts), dtype=np.int64)
    return np.minimum(best, starts // SHORTEST_PART)


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int64: start, start + 1, ... for each start, `count` of them, one after the other."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum())


def _groups(keys: np.ndarray, sequences: Sequences, room: int) -> Iterator[np.ndarray]:
    """Runs of sequences whose queries follow each other and whose keys the room holds."""
    begin, total = 0, 0
    for i in range(len(keys)):
        apart = i > begin and sequences.queries[i] != sequences.queries[i - 1] + sequences.counts[i - 1]
        if i > begin and (apart or total + keys[i] > room):
            yield np.arange(begin, i)
            begin, total = i, 0
        total += int(keys[i])
    yield np.arange(begin, len(keys))
