"""Attention as a list of work items, planned on the host. Integers only.

Queries are cut into tiles of one sequence, the keys of a tile into parts of equal length, so that all multiprocessors
have work whatever the lengths are:

    tile 0  |--- part 0 ---|--- part 1 ---|--- part 2 ---|     three items, three partial results, merged
    tile 1  |--- part 0 ---|                                   one item: its result is written directly
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

FIELDS = 8
"""Of an item: first query, queries, row of the page table, first key, key after the last, position of the first query,
first partial result, whether the result is written directly."""
MERGE_FIELDS = 5
"""Of a query with several parts: itself, its first partial result, how many there are, how far apart, and the last."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one launch of the attention kernel does, for one kind of layer."""

    items: np.ndarray
    """int32[W, FIELDS]."""
    merges: np.ndarray
    """int32[M, MERGE_FIELDS]."""
    partials: int
    """Partial results, one a query and part."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a kernel wants its work: at most `queries` a tile, parts in multiples of `keys`, `shortest` keys at least,
    about `items` items."""

    queries: int
    keys: int
    shortest: int
    items: int

    def most_items(self, tiles: int) -> int:
        """No more items come of so many tiles."""
        return tiles + self.items


def plan_work(
    rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, queries: np.ndarray, window: int | None, tiling: Tiling
) -> Work:
    """The work of B sequences: their rows of the page table, positions starts .. starts + counts - 1 of their queries,
    and which query of the step is the first of each, all int[B]. `window`: a query sees so many keys, itself the last;
    None: all before it."""
    counts = counts.astype(np.int64)
    tiles = -(-counts // tiling.queries)
    of = np.repeat(np.arange(len(counts)), tiles)
    at = (np.arange(len(of)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tiling.queries
    size = np.minimum(tiling.queries, counts[of] - at)
    position = starts.astype(np.int64)[of] + at
    query = queries.astype(np.int64)[of] + at
    last = position + size
    first = np.zeros_like(last) if window is None else np.maximum(position - window + 1, 0)
    length, parts = _split(last - first, tiling)

    tile = np.repeat(np.arange(len(of)), parts)
    part = np.arange(len(tile)) - np.repeat(np.cumsum(parts) - parts, parts)
    begin = first[tile] + part * length[tile]
    partials = np.where(parts > 1, parts * size, 0)
    base = np.cumsum(partials) - partials
    items = np.empty((len(tile), FIELDS), dtype=np.int32)
    items[:, 0] = query[tile]
    items[:, 1] = size[tile]
    items[:, 2] = rows[of][tile]
    items[:, 3] = begin
    items[:, 4] = np.minimum(begin + length[tile], last[tile])
    items[:, 5] = position[tile]
    items[:, 6] = base[tile] + part * size[tile]
    items[:, 7] = parts[tile] == 1

    split = np.flatnonzero(parts > 1)
    times = size[split]
    merges = np.empty((int(times.sum()), MERGE_FIELDS), dtype=np.int32)
    within = np.arange(len(merges)) - np.repeat(np.cumsum(times) - times, times)
    merges[:, 0] = np.repeat(query[split], times) + within
    merges[:, 1] = np.repeat(base[split], times) + within
    merges[:, 2] = np.repeat(parts[split], times)
    merges[:, 3] = np.repeat(times, times)
    merges[:, 4] = merges[:, 1] + (merges[:, 2] - 1) * merges[:, 3]
    return Work(items, merges, int(partials.sum()))


def _split(keys: np.ndarray, tiling: Tiling) -> tuple[np.ndarray, np.ndarray]:
    """(length of a part, parts) of tiles with so many keys: parts of about the same length everywhere."""
    goal = max(tiling.shortest, _rounded_up(-(-int(keys.sum()) // tiling.items), tiling.keys))
    parts = -(-keys // goal)
    length = _rounded_up(_rounded_up(keys, parts) // parts, tiling.keys)
    return length, -(-keys // length)


def _rounded_up(x: Any, unit: Any) -> Any:
    """The next multiple of `unit`, of integers or arrays."""
    return -(-x // unit) * unit
