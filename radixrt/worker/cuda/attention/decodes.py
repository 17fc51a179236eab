"""Plans the attention work of decodes, by what they share, and keeps the plan from step to step.

While the batch stays the same, each request's last part grows by a token per step. The work is planned anew when it has
grown by GROWTH, or when a request joins or leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from radixrt.messages.ranks import RequestInfo
from radixrt.worker.cuda.attention import attend, variants
from radixrt.worker.cuda.attention.segments import FA3_QUERIES, Chip, cut_segments
from radixrt.worker.cuda.attention.work import (
    FIELDS,
    Items,
    Tiles,
    Tiling,
    make_items,
    make_merges,
    segment_tiles,
    sequence_tiles,
)
from radixrt.worker.cuda.elementwise.staging import PackedArray, Packer
from radixrt.worker.execution.prefix_sharing import Cost, Path, Sharing, find_sharing, path_before

GROWTH = 64
"""Tokens by which requests grow before their work is planned anew."""
DEARER = 4
"""Factor by which the cost of a partial result is raised, each time that a plan with less sharing is tried."""
GATHER, LAUNCHES, SLOWER = 0.16, 1800, 2.6
"""Additional costs of FA3 for segments, in keys of a round (see `segments.Chip.cut`): to gather a key, and to launch;
and how many times as long the kernel over pages takes for the same product (bench/attention.py)."""
LARGE = 1 << 19
"""The fewest pairs of a query and a key of a segment that may go to FA3."""


def sharing_cost(shape: variants.Shape, itemsize: int, many: variants.Variant) -> Cost:
    """The cost model for pages of `itemsize` bytes per element. Partial results are float32."""
    return Cost(
        key_bytes=shape.key_elements * itemsize,
        partial_bytes=2 * 4 * shape.heads * shape.value_dim,
        tile=many.queries(shape.group),
    )


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Decides whether large segments go to FA3, which takes up to `keys` keys in all."""

    chip: Chip
    keys: int

    def goal(self, queries: np.ndarray, keys: np.ndarray) -> int:
        """Keys of a part for segments with int64[N] queries and keys; 0 if FA3 cannot take them or is not faster."""
        total = int(keys.sum())
        if not 0 < total <= self.keys:
            return 0
        goal, time = self.chip.cut(queries, keys)
        plain = SLOWER * int((queries * keys).sum()) * self.chip.heads / (FA3_QUERIES * self.chip.num_sms)
        return goal if time + GATHER * total + LAUNCHES < plain else 0


@dataclass(frozen=True, slots=True)
class Cuts:
    """How work is divided for the kernels for tiles of few and of many queries. `cost` decides which sharing pays;
    None: nothing is shared."""

    few: Tiling
    many: Tiling
    cost: Cost | None
    shared_prefixes: SharedPrefixes | None = None


@dataclass(frozen=True, slots=True)
class Room:
    """The most entries of each list of a batch; a batch that would need more shares less."""

    few: int
    many: int
    merges: int
    entries: int

    @classmethod
    def of(cls, size: int, cuts: Cuts) -> Room:
        """The room of `size` decodes."""
        few = cuts.few.most_items(2 * size if cuts.cost else size)
        many = cuts.many.most_items(size) if cuts.cost else 0
        return cls(few, many, size, few + (few + many * cuts.many.queries if cuts.cost else 0))

    def holds(self, work: DecodeWork) -> bool:
        found = (len(work.few), len(work.many), len(work.merges), len(work.entries))
        return all(a <= b for a, b in zip(found, (self.few, self.many, self.merges, self.entries), strict=True))


@dataclass(slots=True)
class DecodeWork:
    """The work of decodes in the layers of one window: the items of both kernels, the merges and their entries, int32,
    and the order: queries of items are indices into it."""

    few: Items
    many: Items
    merges: np.ndarray
    entries: np.ndarray
    order: np.ndarray
    growing: np.ndarray
    """By request, in the order of the batch: the item of `few` that ends at its position."""
    shared: bool
    """Whether there are tiles of several sequences."""
    shared_prefixes: np.ndarray
    """Parts of segments for FA3 (see `segments.cut_segments`); entries of merges refer to their partial results from
    `attend.MORE` on. Work that has shared prefixes cannot run as a graph."""


@dataclass(slots=True)
class _Kept:
    requests: tuple[RequestInfo, ...]
    rows: np.ndarray
    positions: np.ndarray
    sharing: Sharing | None
    work: DecodeWork


class DecodePlanner:
    """Plans the decodes of each step. Layers with a window share nothing and are planned every time."""

    def __init__(self, windows: set[int | None], cuts: Cuts) -> None:
        self._windows = windows
        self._cuts = cuts
        self._kept: _Kept | None = None
        self.read_keys = 0
        """Keys that decodes have read so far in a layer without a window."""
        self.plain_keys = 0
        """Keys that they would have read without sharing."""

    def plan(
        self, requests: tuple[RequestInfo, ...], paths: Sequence[Path], rows: np.ndarray, positions: np.ndarray,
        room: Room | None,
    ) -> dict[int | None, DecodeWork]:  # fmt: skip
        """The work of requests whose tokens are at int32 `positions`, by window. `paths`: theirs in the tree; without
        them nothing is shared. Sharing is limited so that the lists fit `room` (None: that of as many decodes), except
        for work with shared prefixes."""
        works: dict[int | None, DecodeWork] = {}
        for window in self._windows:
            if window is None:
                works[None] = self._unwindowed(requests, paths, rows, positions, room)
            else:
                works[window] = self._cut(rows, positions, window, None)
        return works

    def _unwindowed(
        self, requests: tuple[RequestInfo, ...], paths: Sequence[Path], rows: np.ndarray, positions: np.ndarray,
        room: Room | None,
    ) -> DecodeWork:  # fmt: skip
        kept = self._kept
        same = kept is not None and kept.requests == requests and np.array_equal(kept.rows, rows)
        if kept is not None and same and (room is None or len(kept.work.shared_prefixes) or room.holds(kept.work)):
            grown = int(positions[0] - kept.positions[0]) if len(positions) else 0
            fixed = self._cuts.few.fixed or 1 << 30
            if (
                0 <= grown < GROWTH
                and np.array_equal(positions, kept.positions + grown)
                and np.array_equal(positions // fixed, kept.positions // fixed)
            ):
                items = kept.work.few.items
                items[kept.work.growing, 4] = positions + 1
                items[kept.work.growing, 5] = positions
                self._count(positions, kept.sharing)
                return kept.work
        room = room or Room.of(len(rows), self._cuts)
        for sharing in self._sharings(paths, positions):
            work = self._cut(rows, positions, None, sharing)
            if sharing is None or len(work.shared_prefixes) or room.holds(work):
                break
        self._kept = _Kept(requests, rows.copy(), positions.copy(), sharing, work)
        self._count(positions, sharing)
        return work

    def _sharings(self, paths: Sequence[Path], positions: np.ndarray) -> Iterator[Sharing | None]:
        """Candidates to be tried in turn until the lists fit: all sharing that pays, then only what saves more and
        more, and at last None. (Lists get too long where branches leave a path one by one.)"""
        cost = self._cuts.cost
        if cost is not None and len(paths) > 1:
            paths = [path_before(path, p) for path, p in zip(paths, positions.tolist(), strict=True)]
            while len((sharing := find_sharing(paths, cost)).segments):
                yield sharing
                cost = replace(cost, partial_bytes=DEARER * cost.partial_bytes)
        yield None

    def _cut(self, rows: np.ndarray, positions: np.ndarray, window: int | None, sharing: Sharing | None) -> DecodeWork:
        places = np.arange(len(rows))
        tiles = sequence_tiles(rows, positions, np.ones_like(rows), places, window, 1, self._cuts.few.chunked)
        if sharing is None:
            few, ends = make_items(tiles, self._cuts.few)
            merges = make_merges([few.items])
            order = places.astype(np.int32)
            many = Items.none(self._cuts.many.programs)
            return DecodeWork(few, many, merges.queries, merges.entries, order, ends, False, _NONE)
        order = sharing.order
        tiles = Tiles(places, tiles.size, tiles.row[order], sharing.own[order], tiles.end[order], tiles.position[order])
        begin, end, _, count = sharing.segments.T
        big = count > self._cuts.few.queries
        in_prefix, shared_prefixes = self._shared_prefixes(sharing, rows, end - begin, count)
        big &= ~in_prefix
        small = segment_tiles(sharing, rows, self._cuts.few.queries, np.flatnonzero(~big & ~in_prefix))
        few, ends = make_items(_joined(tiles, small), self._cuts.few)
        large = segment_tiles(sharing, rows, self._cuts.many.queries, np.flatnonzero(big))
        many, _ = make_items(large, self._cuts.many, few.partials)
        lists = (
            [few.items, many.items, _prefix_items(shared_prefixes)] if len(shared_prefixes) else [few.items, many.items]
        )
        merges = make_merges(lists, order)
        growing = np.empty(len(rows), dtype=np.int64)
        growing[order] = ends[: len(rows)]
        return DecodeWork(
            few, many, merges.queries, merges.entries, order.astype(np.int32), growing, True, shared_prefixes
        )

    def _shared_prefixes(
        self, sharing: Sharing, rows: np.ndarray, keys: np.ndarray, count: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(bool[N]: which segments go to FA3; their parts.)"""
        chosen = np.zeros(len(count), dtype=bool)
        if self._cuts.shared_prefixes is not None:
            large = count * keys >= LARGE
            if large.any() and (goal := self._cuts.shared_prefixes.goal(count[large], keys[large])):
                return large, cut_segments(sharing, rows, goal, np.flatnonzero(large))
        return chosen, _NONE

    def _count(self, positions: np.ndarray, sharing: Sharing | None) -> None:
        keys = int(positions.sum()) + len(positions)
        self.plain_keys += keys
        self.read_keys += keys - (sharing.saved_keys if sharing else 0)


_NONE = np.zeros((0, 5), dtype=np.int64)


def _prefix_items(parts: np.ndarray) -> np.ndarray:
    """Items for `make_merges` that represent the parts of shared prefixes."""
    items = np.zeros((len(parts), FIELDS), dtype=np.int32)
    items[:, 0], items[:, 1] = parts[:, 3], parts[:, 4]
    items[:, 6] = attend.MORE + np.cumsum(parts[:, 4]) - parts[:, 4]
    return items


def _joined(a: Tiles, b: Tiles) -> Tiles:
    names = ("query", "size", "row", "begin", "end", "position")
    return Tiles(*(np.concatenate([getattr(a, name), getattr(b, name)]) for name in names))


@dataclass(frozen=True, slots=True)
class Lists:
    """The packed arrays of a DecodeWork; `few` and `many` are items and their starts."""

    few: tuple[PackedArray, PackedArray | None]
    many: tuple[PackedArray, PackedArray | None]
    merges: PackedArray
    entries: PackedArray
    order: PackedArray
    shared: bool

    @classmethod
    def pack(cls, packer: Packer, work: DecodeWork, room: Room | None = None, size: int | None = None) -> Lists:
        """With `room`, each list is padded to it, and the order to `size`."""
        most = (None,) * 4 if room is None else (room.few, room.many, room.merges, room.entries)
        few, many = (
            (packer.add(x.items, count), None if x.starts is None else packer.add(x.starts))
            for x, count in zip((work.few, work.many), most, strict=False)
        )
        merges, entries = packer.add(work.merges, most[2]), packer.add(work.entries, most[3])
        return cls(few, many, merges, entries, packer.add(work.order, size), work.shared)
