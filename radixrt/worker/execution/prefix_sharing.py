"""Finds which requests of a batch share which pages, by their paths in the radix tree. The result is segments of keys
that several requests' queries read together.

    nodes of the tree        batch, in an order that         segments           each request's own
                             keeps sharers together
       system (6k)           a b c d                         [0, 6k) a b c d
       /         \\
    agent 1     agent 2      a b | c d                       [6k, 9k) a b       a: from 9k, b: from 9k
      3k          40         (40 tokens do not pay)                             c: from 6k, d: from 6k

A segment is read once for all its queries rather than once for each, and costs each of them one more partial result.
Where that does not pay, its keys join those of the nodes below it, and in the end are read by each request alone.
Integers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Path = Sequence[tuple[int, int]]
"""The nodes of a lease from the root down: (name of the node, tokens from the root to its end)."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost model of sharing, in bytes of memory traffic of one layer."""

    key_bytes: int
    """K and V of one token."""
    partial_bytes: int
    """Writing and reading a partial result of one query."""
    tile: int
    """Queries that read keys together, as one tile."""

    def saved(self, queries: int, keys: int) -> int:
        """Bytes that one segment saves; negative if it does not pay:
        (queries - ceil(queries / tile)) * keys * key_bytes - (queries + 1) * partial_bytes."""
        saved_reads = queries - -(-queries // self.tile)
        return saved_reads * keys * self.key_bytes - (queries + 1) * self.partial_bytes


@dataclass(frozen=True, slots=True)
class Sharing:
    """`order` int64[B]: indices of the requests, those that share next to each other. `segments` int64[N, 4]: first
    key, end of the keys, first place in `order`, number of places. `own` int64[B]: the first key that each request
    reads alone, by its index in the batch."""

    order: np.ndarray
    segments: np.ndarray
    own: np.ndarray

    @property
    def saved_keys(self) -> int:
        """Key reads that sharing saves."""
        return int(((self.segments[:, 1] - self.segments[:, 0]) * (self.segments[:, 3] - 1)).sum())


def path_before(path: Path, position: int) -> Path:
    """The part of a path before `position`, that of a request's first token to compute. (A path may be longer: it
    includes what this step computes, and the last token of a prompt that is entirely cached is computed again.)"""
    if not path or path[-1][1] <= position:
        return path
    nodes = []
    begin = 0
    for name, end in path:
        if begin >= position:
            break
        # Part of a node gets a name of its own, the same for all requests that share exactly this part.
        nodes.append((name, end) if end <= position else (-(name << 32) - position, position))
        begin = end
    return tuple(nodes)


def find_sharing(paths: Sequence[Path], cost: Cost) -> Sharing:
    """Find what requests share, by their paths. Every key before a request's `own` is in exactly one of its segments.

    Requests that share follow the first of them in the batch. The result does not depend on the names of nodes, so that
    the same batch is always split, and its sums rounded, in the same way."""
    first = {name: i for i in reversed(range(len(paths))) for name, _ in paths[i]}
    order = sorted(range(len(paths)), key=lambda i: [first[name] for name, _ in paths[i]])
    own = np.zeros(len(paths), dtype=np.int64)
    segments: list[list[int]] = []
    _descend(paths, order, segments, own, cost)
    return Sharing(np.array(order, dtype=np.int64), np.array(segments, dtype=np.int64).reshape(-1, 4), own)


def with_sharers(sharing: Sharing) -> tuple[np.ndarray, Sharing]:
    """Leave out the requests that share nothing. Returns (int64 indices of the others, ascending; the sharing of these,
    by their places in that array)."""
    change = np.zeros(len(sharing.order) + 1, dtype=np.int64)
    np.add.at(change, sharing.segments[:, 2], 1)
    np.add.at(change, sharing.segments[:, 2] + sharing.segments[:, 3], -1)
    under = np.cumsum(change[:-1]) > 0
    places: np.ndarray = np.cumsum(under) - under
    chosen = np.sort(sharing.order[under])
    segments = sharing.segments.copy()
    segments[:, 2] = places[segments[:, 2]]
    return chosen, Sharing(np.searchsorted(chosen, sharing.order[under]), segments, sharing.own[chosen])


def _descend(paths: Sequence[Path], order: list[int], segments: list[list[int]], own: np.ndarray, cost: Cost) -> None:
    """Fill in `segments` and `own`. Iterative, since the paths of a conversation that branches at every turn are
    deep."""
    # Requests order[first:last] have `depth` nodes in common; keys from `begin` on are not in a segment yet; `above` is
    # the index of the segment that ends at `begin` and has exactly these requests, or -1.
    todo = [(0, len(order), 0, 0, -1)]
    while todo:
        first, last, depth, begin, above = todo.pop()
        if first == last:
            continue
        path = paths[order[first]]
        if len(path) <= depth:  # the path ends here
            own[order[first]] = begin
            todo.append((first + 1, last, depth, begin, -1))
            continue
        name, end = path[depth]
        stop = first + 1
        while stop < last and len(paths[order[stop]]) > depth and paths[order[stop]][depth][0] == name:
            stop += 1
        todo.append((stop, last, depth, begin, -1))
        count = stop - first
        if count == 1:
            own[order[first]] = begin
        elif above >= 0 and segments[above][3] == count:  # the same requests go on together
            segments[above][1] = end
            todo.append((first, stop, depth + 1, end, above))
        elif cost.saved(count, end - begin) > 0:
            segments.append([begin, end, first, count])
            todo.append((first, stop, depth + 1, end, len(segments) - 1))
        else:
            todo.append((first, stop, depth + 1, begin, -1))
