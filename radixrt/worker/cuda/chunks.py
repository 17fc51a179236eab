"""Attention of chunks: many new tokens after what is cached.

Two ways. The kernel of `attend` reads pages in place and splits keys over the chip: best for few queries (PagedStep).
FlashInfer's FA3 (`ragged`, `segments`) wants K and V side by side in the activations' dtype: cached pages are widened
into a workspace first, which costs their bytes once a layer and gains most of the tensor cores' speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from radixrt.worker.cuda import attend
from radixrt.worker.cuda.attend import Scratch
from radixrt.worker.cuda.staging import Packer, Piece
from radixrt.worker.cuda.variants import Shape, Variant
from radixrt.worker.cuda.work import Tiles, Tiling, make_items, make_merges, sequence_tiles

HELD_BYTES = 1 << 29
"""Of partial results at a time, where parts are fixed: those of a chunk behind a long context would not fit the GPU."""
MOST_ITEMS = (1 << 16) - 1
"""Of a launch: a grid's second size (CUDA C++ Programming Guide, compute capabilities)."""


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
    """K and V of one layer, [slots, kv_heads, D], the page table int32[rows, pages], and what K and V are times;
    `sinks` float32[heads], where there are some."""

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    scales: tuple[float, float]
    window: int | None
    sinks: torch.Tensor | None = None


class ChunkStep(Protocol):
    """The attention of one step's chunks."""

    def sent(self, integers: torch.Tensor) -> None:
        """What was packed is on the device."""

    def run(self, q: torch.Tensor, pages: Pages, out: torch.Tensor) -> None:
        """Write the attention of the chunks' tokens among q[T, heads, D] to out[T, heads, D]."""


class LastLayer:
    """The chunks of the last `layer`, where they are others. They are planned when that layer is launched: the device
    has all layers before it to compute then, and does not wait for the plan."""

    def __init__(self, layer: int, make: Callable[[Packer], list[ChunkStep]], packer: Packer) -> None:
        """`packer`: of nothing else that is under way."""
        self.layer = layer
        self._make = make
        self._packer = packer

    def steps(self) -> list[ChunkStep]:
        """Those that are ready to run."""
        self._packer.clear()
        steps = self._make(self._packer)
        sent = self._packer.send()
        for step in steps:
            step.sent(sent)
        return steps


# ---------------------------------------------------------------- over pages, in place


class PagedStep:
    """See the module; by work lists for each kind of layer: one, or where parts are fixed one after the other. `plain`:
    the kernel of layers without a window, and how its work is cut, where it is another one."""

    def __init__(
        self,
        sequences: Sequences,
        windows: set[int | None],
        packer: Packer,
        shape: Shape,
        variant: Variant,
        cut: Tiling,
        plain: tuple[Variant, Tiling] | None = None,
    ) -> None:
        self._shape = shape
        self._variants: dict[int | None, Variant] = {}
        self._pieces: dict[int | None, list[tuple[Piece | None, ...]]] = {window: [] for window in windows}
        self._partials = 1
        most = min(MOST_ITEMS, HELD_BYTES // (4 * shape.heads * (shape.value_dim + 1)))
        for window in windows:
            self._variants[window], how = plain if plain is not None and window is None else (variant, cut)
            tiles = sequence_tiles(
                sequences.rows, sequences.starts, sequences.counts, sequences.queries, window, how.queries
            )
            for part in _rounds(tiles, how.fixed, most) if how.fixed else (tiles,):
                items, _ = make_items(part, how)
                merges = make_merges([items.items])
                lists = items.items, items.starts, merges.queries, merges.entries
                self._pieces[window].append(tuple(None if x is None else packer.add(x) for x in lists))
                self._partials = max(self._partials, merges.partials)

    def sent(self, integers: torch.Tensor) -> None:
        self._lists = {
            window: [[x and x.of(integers) for x in pieces] for pieces in rounds]
            for window, rounds in self._pieces.items()
        }
        self._scratch = Scratch.make(self._partials, self._shape, integers.device)
        self._again = {window: self._shape.again() for window in self._pieces}

    def run(self, q: torch.Tensor, pages: Pages, out: torch.Tensor) -> None:
        again = self._again[pages.window]
        for items, starts, merges, entries in self._lists[pages.window]:
            attend.attend(
                q, pages.keys, pages.values, pages.table, (items, starts), out, self._scratch, self._shape,
                self._variants[pages.window], window=pages.window, causal=True, scales=pages.scales, sinks=pages.sinks,
                again=again,
            )  # fmt: skip
            attend.merge(
                self._scratch.partials, merges, entries, out, self._shape, sinks=pages.sinks, again=again,
            )  # fmt: skip


def _rounds(tiles: Tiles, fixed: int, most: int) -> Iterator[Tiles]:
    """Runs of tiles with parts of `fixed` keys that have so many partial results at most, or are one tile."""
    ends = np.cumsum(tiles.size * -(-tiles.end // fixed))
    begin = 0
    while begin < len(tiles):
        before = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + most, side="right")))
        yield tiles.take(slice(begin, end))
        begin = end
