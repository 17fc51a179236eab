"""Attention as a list of work items, planned on the host. Integers only.

A tile is some queries that read the same keys: neighbours of one sequence, or the sequences under a shared prefix. Its
keys are cut into parts of about the same length everywhere, so that all multiprocessors have work whatever the lengths
are. A query gets a partial result of every part of every tile that it is in, and these are merged:

    tile 0, queries 0 1 2 3   |--- part ---|--- part ---|        shared prefix
    tile 1, query 0                                     |-|      what is its own
    tile 2, query 1                                     |----|   ...

A query with a single part needs no merge: its result is written directly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from radixrt.worker.sharing import Sharing

FIELDS = 8
"""Of an item: first query, queries, row of the page table, first key, key after the last, position of the first query,
first partial result, whether the result is written directly."""
MERGE_FIELDS = 3
"""Of a query that is merged: itself, where its entries in the list of partial results begin, and how many there are."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a kernel wants its work: at most `queries` a tile, parts in multiples of `keys`, `shortest` keys at least,
    about `items` items. With `fixed`, parts are the same whatever the batch is: keys 0 to `fixed`, and so on."""

    queries: int
    keys: int
    shortest: int
    items: int
    fixed: int = 0

    def most_items(self, tiles: int) -> int:
        """No more items come of so many tiles (`fixed`: if none is longer than `items` parts)."""
        return tiles * self.items if self.fixed else tiles + self.items


@dataclass(frozen=True, slots=True)
class Tiles:
    """int64 arrays, one entry a tile: `size` queries from `query` on read keys `begin` to `end` of a row of the page
    table; the first of them is at `position`."""

    query: np.ndarray
    size: np.ndarray
    row: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    position: np.ndarray

    def __len__(self) -> int:
        return len(self.query)


@dataclass(frozen=True, slots=True)
class Merges:
    """How partial results become results."""

    queries: np.ndarray
    """int32[M, MERGE_FIELDS]."""
    entries: np.ndarray
    """int32: partial results, those of a query side by side."""
    partials: int
    """Partial results there are."""


# ---------------------------------------------------------------- tiles


def sequence_tiles(
    rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, queries: np.ndarray, window: int | None, most: int
) -> Tiles:
    """Of B sequences, in tiles of at most `most` queries: their rows of the page table, positions starts .. starts +
    counts - 1 of their queries, and which query of the step is the first of each, all int[B]. `window`: a query sees so
    many keys, itself the last; None: all before it."""
    counts = counts.astype(np.int64)
    tiles = -(-counts // most)
    of = np.repeat(np.arange(len(counts)), tiles)
    at = (np.arange(len(of)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * most
    size = np.minimum(most, counts[of] - at)
    position = starts.astype(np.int64)[of] + at
    end = position + size
    begin = np.zeros_like(end) if window is None else np.maximum(position - window + 1, 0)
    return Tiles(queries.astype(np.int64)[of] + at, size, rows.astype(np.int64)[of], begin, end, position)


def segment_tiles(sharing: Sharing, rows: np.ndarray, most: int, chosen: np.ndarray) -> Tiles:
    """Of shared segments, by number; queries are places in `sharing.order`, any row under a segment shows its pages."""
    begin, end, first, count = (sharing.segments[chosen, i] for i in range(4))
    tiles = -(-count // most)
    of = np.repeat(np.arange(len(chosen)), tiles)
    at = (np.arange(len(of)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * most
    size = np.minimum(most, count[of] - at)
    query = first[of] + at
    return Tiles(query, size, rows[sharing.order[query]].astype(np.int64), begin[of], end[of], end[of])


# ---------------------------------------------------------------- items


def make_items(tiles: Tiles, tiling: Tiling, first_partial: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(int32[W, FIELDS] of the parts of tiles, none direct; the last item of each tile)."""
    # Fixed parts are counted from key 0 also where a window begins later: a result is merged from the same places.
    first = np.zeros_like(tiles.begin) if tiling.fixed else tiles.begin
    length, parts = _split(tiles.end - first, tiling)
    tile = np.repeat(np.arange(len(tiles)), parts)
    part = np.arange(len(tile)) - np.repeat(np.cumsum(parts) - parts, parts)
    begin = first[tile] + part * length[tile]
    size = tiles.size[tile]
    items = np.empty((len(tile), FIELDS), dtype=np.int32)
    items[:, 0] = tiles.query[tile]
    items[:, 1] = size
    items[:, 2] = tiles.row[tile]
    items[:, 3] = begin
    items[:, 4] = np.minimum(begin + length[tile], tiles.end[tile])
    items[:, 5] = tiles.position[tile]
    items[:, 6] = first_partial + np.cumsum(size) - size
    items[:, 7] = 0
    return items, np.cumsum(parts) - 1


def make_merges(lists: list[np.ndarray], order: np.ndarray | None = None) -> Merges:
    """Of all items of a step, which may be several launches; marks those that are direct. `order`: queries are places
    in it."""
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


def _split(keys: np.ndarray, tiling: Tiling) -> tuple[np.ndarray, np.ndarray]:
    """(length of a part, parts) of tiles with so many keys: parts of about the same length everywhere."""
    if tiling.fixed:
        return np.full_like(keys, tiling.fixed), -(-keys // tiling.fixed)
    goal = max(tiling.shortest, _rounded_up(-(-int(keys.sum()) // tiling.items), tiling.keys))
    parts = -(-keys // goal)
    length = _rounded_up(_rounded_up(keys, parts) // parts, tiling.keys)
    return length, -(-keys // length)


def _rounded_up(x: Any, unit: Any) -> Any:
    """The next multiple of `unit`, of integers or arrays."""
    return -(-x // unit) * unit
