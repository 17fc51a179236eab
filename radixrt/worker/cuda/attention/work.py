"""Divides attention into lists of work items, on the host. Integers only.

A tile is a set of queries that read the same keys: neighbours in one sequence, or the sequences under a shared prefix.
The tiles' keys, laid end to end, are divided evenly among as many programs as run at once, so that all have equal work
and end together, whatever the lengths are (the idea of Stream-K, arXiv 2301.03598, applied to keys). A query gets a
partial result from every part of every tile that it is in, and these are merged:

    tile 0, queries 0 1 2 3   |-------------------------------|          shared prefix
    tile 1, query 0                                           |---|      its own keys
    tile 2, query 1                                               |----------|
    programs                  |  0  |  1  |  2  |  3  |  4  |  5  |  6  |  7  |

A query with a single part needs no merge: its result is written directly.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from radixrt.worker.execution.prefix_sharing import Sharing

FIELDS = 8
"""Integers of an item: first query, number of queries, row of the page table, first key, key after the last, position
of the first query, first partial result, whether the result is written directly."""
MERGE_FIELDS = 3
"""Integers of a merge: the query, where its entries in the list of partial results begin, and how many there are."""

BEGINNING = 1
"""Cost of starting a tile, in blocks of keys."""
ROUNDS = 2
"""With `Tiling.single`: parts for each program that runs at once."""
UNEVEN = (1 / 32, 1 / 16, 1 / 8)
"""How much more than an equal share a program may have, as a fraction of it, if then no tile has to be divided. The
smallest that suffices is taken."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How work is divided for a kernel: at most `queries` queries per tile, parts in multiples of `keys` keys, evenly
    for `programs` programs, each of which gets at least `shortest` keys.

    With `single`, each part has a program of its own, and parts have about the same length: without the loop over items
    the kernel needs fewer registers, and takes a sixth less time for large chunks. With `fixed`, each part has a
    program of its own as well, and parts do not depend on the batch: keys [0, fixed), [fixed, 2 fixed) and so on.

    With `chunked`, windows are chunks (see `AttentionSpec.chunked`)."""

    queries: int
    keys: int
    shortest: int
    programs: int
    fixed: int = 0
    single: bool = False
    chunked: bool = False

    def most_items(self, tiles: int) -> int:
        """The most items that `tiles` tiles are divided into, without `fixed` and `single`."""
        return tiles + self.programs


@dataclass(frozen=True, slots=True)
class Tiles:
    """int64 arrays with one entry per tile: `size` queries from `query` on read the keys [begin, end) of `row` of the
    page table. The first query is at `position`."""

    query: np.ndarray
    size: np.ndarray
    row: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    position: np.ndarray

    def __len__(self) -> int:
        return len(self.query)

    def take(self, chosen: slice) -> Tiles:
        return Tiles(
            self.query[chosen], self.size[chosen], self.row[chosen], self.begin[chosen], self.end[chosen],
            self.position[chosen],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Items:
    """The work list of a kernel."""

    items: np.ndarray
    """int32[W, FIELDS]."""
    starts: np.ndarray | None
    """int32[P + 1]: program p computes the items [starts[p], starts[p + 1]), one after the other. None: item p only."""

    def __len__(self) -> int:
        return len(self.items)

    @property
    def partials(self) -> int:
        return int(self.items[:, 1].sum())

    @classmethod
    def none(cls, programs: int) -> Items:
        return cls(np.zeros((0, FIELDS), dtype=np.int32), np.zeros(programs + 1, dtype=np.int32))


@dataclass(frozen=True, slots=True)
class Merges:
    """Which partial results are merged into which results."""

    queries: np.ndarray
    """int32[M, MERGE_FIELDS]."""
    entries: np.ndarray
    """int32: indices of partial results, those of a query next to each other."""
    partials: int
    """How many partial results there are."""


# ---------------------------------------------------------------- tiles


def sequence_tiles(
    rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, queries: np.ndarray, window: int | None, most: int,
    chunked: bool = False,
) -> Tiles:  # fmt: skip
    """Divide B sequences into tiles of at most `most` queries. By sequence, int[B]: its row of the page table, the
    position of its first query, its number of queries, and the first query's index in the step. `window`: how many keys
    a query sees, including its own, or with `chunked` how many those of its chunk see; None: all up to its own."""
    counts = counts.astype(np.int64)
    tiles = -(-counts // most)
    of = np.repeat(np.arange(len(counts)), tiles)
    at = (np.arange(len(of)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * most
    size = np.minimum(most, counts[of] - at)
    position = starts.astype(np.int64)[of] + at
    end = position + size
    if window is None:
        begin = np.zeros_like(end)
    else:
        begin = position - position % window if chunked else np.maximum(position - window + 1, 0)
    return Tiles(queries.astype(np.int64)[of] + at, size, rows.astype(np.int64)[of], begin, end, position)


def segment_tiles(sharing: Sharing, rows: np.ndarray, most: int, chosen: np.ndarray) -> Tiles:
    """Divide the `chosen` segments into tiles of at most `most` queries. Queries are indices into `sharing.order`. A
    tile takes the row of its first request: the pages of a segment are in the rows of all its requests."""
    begin, end, first, count = (sharing.segments[chosen, i] for i in range(4))
    tiles = -(-count // most)
    of = np.repeat(np.arange(len(chosen)), tiles)
    at = (np.arange(len(of)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * most
    size = np.minimum(most, count[of] - at)
    query = first[of] + at
    return Tiles(query, size, rows[sharing.order[query]].astype(np.int64), begin[of], end[of], end[of])


# ---------------------------------------------------------------- items


def make_items(tiles: Tiles, tiling: Tiling, first_partial: int = 0) -> tuple[Items, np.ndarray]:
    """Returns (items for the parts of tiles, none marked as direct; the index of each tile's last item)."""
    # Fixed parts are counted from key 0 even where a window begins later, so that their boundaries are always the same.
    first = np.zeros_like(tiles.begin) if tiling.fixed else tiles.begin
    cut = _fixed if tiling.fixed else _equal if tiling.single else _even
    tile, begin, end, starts = cut(tiles.end - first, tiling)
    size = tiles.size[tile]
    items = np.empty((len(tile), FIELDS), dtype=np.int32)
    items[:, 0] = tiles.query[tile]
    items[:, 1] = size
    items[:, 2] = tiles.row[tile]
    items[:, 3] = first[tile] + begin
    items[:, 4] = first[tile] + end
    items[:, 5] = tiles.position[tile]
    items[:, 6] = first_partial + np.cumsum(size) - size
    items[:, 7] = 0
    return Items(items, starts), np.cumsum(np.bincount(tile, minlength=len(tiles))) - 1


def make_merges(lists: list[np.ndarray], order: np.ndarray | None = None) -> Merges:
    """The merges for all items of a step, given as int32[W, FIELDS] for each launch. Marks the items whose results are
    written directly. With `order`, queries of items are indices into it."""
    items = np.concatenate(lists) if len(lists) > 1 else lists[0]
    size = items[:, 1].astype(np.int64)
    of = np.repeat(np.arange(len(items)), size)
    within = np.arange(len(of)) - np.repeat(np.cumsum(size) - size, size)
    query = items[of, 0] + within
    if order is not None:
        query = order[query]
    times = np.bincount(query)
    merged = times[query] > 1
    alone = np.ones(len(items), dtype=bool)
    alone[of[merged]] = False
    first = 0
    for part in lists:
        part[:, 7] = alone[first : first + len(part)]
        first += len(part)
    query, entries = query[merged], (items[of, 6] + within)[merged]
    entries = entries[np.argsort(query, kind="stable")].astype(np.int32)
    which = np.flatnonzero(times > 1)
    counts = times[which]
    queries = np.stack([which, np.cumsum(counts) - counts, counts], axis=1).astype(np.int32)
    return Merges(queries, entries, int(size.sum()))


_Parts = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]
"""Parts of tiles, as arrays: tile, first key and end of the keys, counted within the tile; and `Items.starts`."""


def _fixed(keys: np.ndarray, tiling: Tiling) -> _Parts:
    """Parts of `tiling.fixed` keys, for tiles of int64[T] keys."""
    return _of_length(np.full_like(keys, tiling.fixed), keys)


def _equal(keys: np.ndarray, tiling: Tiling) -> _Parts:
    """Parts of about the same length in all tiles, for tiles of int64[T] keys."""
    goal = max(tiling.shortest, -(-int(keys.sum()) // (ROUNDS * tiling.programs)))
    parts = -(-keys // goal)
    return _of_length(-(-keys // (parts * tiling.keys)) * tiling.keys, keys)


def _of_length(length: np.ndarray, keys: np.ndarray) -> _Parts:
    parts = -(-keys // length)
    tile = np.repeat(np.arange(len(keys)), parts)
    begin = (np.arange(len(tile)) - np.repeat(np.cumsum(parts) - parts, parts)) * length[tile]
    return tile, begin, np.minimum(begin + length[tile], keys[tile]), None


def _even(keys: np.ndarray, tiling: Tiling) -> _Parts:
    """Parts for tiles of int64[T] keys. If tiles can be left whole with no program having more than UNEVEN allows, they
    are. Otherwise programs differ by at most one block of keys, BEGINNING included."""
    blocks = -(-keys // tiling.keys)
    end = np.cumsum(blocks + BEGINNING)
    begin = end - blocks
    total = int(end[-1]) if len(keys) else 0
    busy = min(tiling.programs, max(1, total * tiling.keys // tiling.shortest))
    cuts = _between(end, total, busy)
    if cuts is None:
        cuts = np.arange(busy + 1) * total // busy
    first = np.searchsorted(cuts, begin, side="right") - 1
    parts = np.searchsorted(cuts, end - 1, side="right") - first
    tile = np.repeat(np.arange(len(keys)), parts)
    program = first[tile] + np.arange(len(tile)) - np.repeat(np.cumsum(parts) - parts, parts)
    low = np.maximum(cuts[program], begin[tile]) - begin[tile]
    high = np.minimum(cuts[program + 1], end[tile]) - begin[tile]
    starts = np.searchsorted(program, np.arange(tiling.programs + 1)).astype(np.int32)
    return tile, low * tiling.keys, np.minimum(high * tiling.keys, keys[tile]), starts


def _between(ends: np.ndarray, total: int, programs: int) -> np.ndarray | None:
    """Cuts between whole tiles, int64 [programs + 1] or fewer, 0 and some of `ends`, such that no program has more than
    UNEVEN allows; None if there are none."""
    tiles = ends.tolist()
    for more in UNEVEN:
        most, cuts = int((1 + more) * total / programs), [0]
        while cuts[-1] < total and len(cuts) <= programs:
            last = bisect_right(tiles, cuts[-1] + most) - 1
            if last < 0 or tiles[last] == cuts[-1]:  # the next tile alone is too long
                break
            cuts.append(tiles[last])
        if cuts[-1] == total:
            return np.array(cuts)
    return None
