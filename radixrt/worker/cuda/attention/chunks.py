"""Attention of chunks: many new tokens after what is cached.

There are two ways. The kernel of `attend` reads pages in place and splits keys over the chip, which is best for few
queries (PagedStep). FlashInfer's FA3 (`ragged`, `segments`) needs K and V contiguous and in the activations' dtype:
pages are first gathered and converted into a workspace, which moves their bytes once per layer, and the tensor cores
then run near their full rate. (Long chunks of latent attention have a third way, `full_chunks`.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from radixrt.worker.cuda.attention import attend
from radixrt.worker.cuda.attention.attend import Scratch
from radixrt.worker.cuda.attention.pages import Pages
from radixrt.worker.cuda.attention.variants import Shape, Variant
from radixrt.worker.cuda.attention.work import Items, Merges, Tiles, Tiling, make_items, make_merges, sequence_tiles
from radixrt.worker.cuda.elementwise.staging import PackedArray, Packer, of_maybe

HELD_BYTES = 1 << 29
"""The most bytes of partial results at a time, where the length of parts is fixed: those of a chunk after a long
context would not all fit on the GPU."""
MAX_ITEMS = (1 << 16) - 1
"""The most items of a launch: the limit of a grid's second size (CUDA C++ Programming Guide, compute capabilities)."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """The chunks of a step, one for each of B sequences; each array is int[B]."""

    rows: np.ndarray
    starts: np.ndarray
    """Positions of the first new tokens."""
    counts: np.ndarray
    queries: np.ndarray
    """Index of their first new tokens among the step's tokens."""

    def take(self, chosen: np.ndarray) -> Sequences:
        return Sequences(self.rows[chosen], self.starts[chosen], self.counts[chosen], self.queries[chosen])

    def __len__(self) -> int:
        return len(self.rows)


class ChunkStep(Protocol):
    """The attention of one step's chunks."""

    def sent(self, integers: torch.Tensor) -> None:
        """Called with the packed integers on the device, before `run`."""

    def run(self, q: torch.Tensor, pages: Pages, out: torch.Tensor) -> None:
        """Write the attention of the chunks' tokens among q[T, heads, D] to out[T, heads, D]. Once per layer."""


class LastLayers:
    """The attention of chunks in the last layers, from place `first` on among those with attention, where it is
    computed for fewer tokens than in the others. It is planned only when the first of them is launched: the device is
    then busy with earlier layers, and does not wait."""

    def __init__(self, first: int, make: Callable[[Packer], list[ChunkStep]], packer: Packer) -> None:
        """`packer` must not be in use by a step in flight."""
        self.first = first
        self._make = make
        self._packer = packer
        self._steps: list[ChunkStep] | None = None

    def steps(self) -> list[ChunkStep]:
        """The chunks, planned and sent, ready to run."""
        if self._steps is None:
            self._packer.clear()
            self._steps = self._make(self._packer)
            sent = self._packer.send()
            for step in self._steps:
                step.sent(sent)
        return self._steps


# ---------------------------------------------------------------- over pages, in place


@dataclass(frozen=True, slots=True)
class _PackedWork:
    """Packed Items, and the merges of their results."""

    items: PackedArray
    starts: PackedArray | None
    merges: PackedArray
    entries: PackedArray

    @classmethod
    def pack(cls, packer: Packer, items: Items, merges: Merges) -> _PackedWork:
        packed, starts = packer.add(items.items), None if items.starts is None else packer.add(items.starts)
        return cls(packed, starts, packer.add(merges.queries), packer.add(merges.entries))

    def of(self, sent: torch.Tensor) -> tuple[attend.Work, torch.Tensor, torch.Tensor]:
        work = self.items.of(sent), of_maybe(self.starts, sent)
        return work, self.merges.of(sent), self.entries.of(sent)


class PagedStep:
    """A ChunkStep that reads pages in place (see the module). The layers of each window have one work list or, where
    the length of parts is fixed, several that run in turn. `plain`: kernel and tiling of the layers without a window,
    if not `variant` and `cut`."""

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
        self._packed: dict[int | None, list[_PackedWork]] = {window: [] for window in windows}
        self._partials = 1
        most = min(MAX_ITEMS, HELD_BYTES // (4 * shape.heads * (shape.value_dim + 1)))
        for window in windows:
            self._variants[window], how = plain if plain is not None and window is None else (variant, cut)
            tiles = sequence_tiles(
                sequences.rows, sequences.starts, sequences.counts, sequences.queries, window, how.queries, how.chunked
            )
            for part in _rounds(tiles, how.fixed, most) if how.fixed else (tiles,):
                items, _ = make_items(part, how)
                merges = make_merges([items.items])
                self._packed[window].append(_PackedWork.pack(packer, items, merges))
                if len(merges.entries):  # otherwise, all results are written directly
                    self._partials = max(self._partials, merges.partials)

    def sent(self, integers: torch.Tensor) -> None:
        self._lists = {window: [work.of(integers) for work in rounds] for window, rounds in self._packed.items()}
        self._scratch = Scratch.make(self._partials, self._shape, integers.device)
        self._cache = {window: self._shape.kernel_cache() for window in self._packed}

    def run(self, q: torch.Tensor, pages: Pages, out: torch.Tensor) -> None:
        cache = self._cache[pages.window]
        for work, merges, entries in self._lists[pages.window]:
            attend.attend(
                q, pages.keys, pages.values, pages.table, work, out, self._scratch, self._shape,
                self._variants[pages.window], window=pages.window, causal=True, scales=pages.scales, sinks=pages.sinks,
                cache=cache,
            )  # fmt: skip
            attend.merge(
                self._scratch.partials, merges, entries, out, self._shape, sinks=pages.sinks, cache=cache,
            )  # fmt: skip


def _rounds(tiles: Tiles, fixed: int, most: int) -> Iterator[Tiles]:
    """Split tiles into runs that each have at most `most` partial results, in parts of `fixed` keys, or are one
    tile."""
    ends = np.cumsum(tiles.size * -(-tiles.end // fixed))
    begin = 0
    while begin < len(tiles):
        before = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + most, side="right")))
        yield tiles.take(slice(begin, end))
        begin = end
