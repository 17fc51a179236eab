"""One step on its way to the device: what is packed, and the attention over it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from radixrt.worker.cuda import attend, kernels
from radixrt.worker.cuda.attend import Scratch, Shape, Variant
from radixrt.worker.cuda.chunks import ChunkStep, Pages
from radixrt.worker.cuda.staging import Packer, Piece
from radixrt.worker.cuda.work import Tiling, plan_work
from radixrt.worker.model.decoder import Heads


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Where the integers of a step's decodes lie, for `size` of them; padding repeats a row that nobody reads."""

    size: int
    tokens: Piece
    positions: Piece
    slots: Piece
    rows: Piece
    lists: dict[int | None, tuple[Piece, Piece]]
    """By window: items and merges."""
    writes: Piece
    """Of the page table."""


class DecodePlanner:
    """Packs decodes; padded to a fixed size, every integer lies where the graph of that size reads it."""

    def __init__(self, windows: set[int | None], cut: Tiling, trash_row: int) -> None:
        self._windows = windows
        self._cut = cut
        self._trash_row = trash_row

    def partials(self, size: int) -> int:
        """Partial results of so many decodes, at most."""
        return self._cut.most_items(size)

    def pack(
        self, packer: Packer, tokens: np.ndarray, positions: np.ndarray, slots: np.ndarray, rows: np.ndarray,
        writes: np.ndarray, size: int | None = None,
    ) -> DecodeInputs:  # fmt: skip
        """With `size`, padded to it, work lists to all the room that they could need."""
        pieces = (
            packer.add(tokens, size),
            packer.add(positions, size),
            packer.add(slots, size),
            packer.add(rows, size, self._trash_row),
        )
        lists = self.lists(packer, rows, positions, size)
        if size is not None:
            padding = np.array([[self._trash_row, 0, 0]], dtype=np.int32).repeat(size - len(writes), axis=0)
            writes = np.concatenate([writes, padding])
        return DecodeInputs(len(rows) if size is None else size, *pieces, lists, packer.add(writes))

    def lists(
        self, packer: Packer, rows: np.ndarray, positions: np.ndarray, size: int | None = None
    ) -> dict[int | None, tuple[Piece, Piece]]:
        """By window, the items and merges of decodes at `positions`."""
        lists = {}
        ones, order = np.ones_like(rows), np.arange(len(rows))
        for window in self._windows:
            work = plan_work(rows, positions, ones, order, window, self._cut)
            room = None if size is None else self._cut.most_items(size)
            lists[window] = packer.add(work.items, room), packer.add(work.merges, size)
        return lists

    def empty(self, packer: Packer, size: int) -> DecodeInputs:
        """A batch of padding alone."""
        none = np.zeros(0, dtype=np.int32)
        return self.pack(packer, none, none, none, none, np.zeros((0, 3), dtype=np.int32), size)


class StepAttention:
    """The attention of one step: decodes first, then chunks (see `plan.Plan`)."""

    def __init__(
        self,
        pages: Callable[[int], Pages],
        slots: torch.Tensor,
        shape: Shape,
        decodes: int,
        decode_lists: dict[int | None, tuple[torch.Tensor, torch.Tensor]],
        variant: Variant,
        scratch: Scratch | None,
        chunks: list[ChunkStep],
    ) -> None:
        self._pages = pages
        self._slots = slots
        self._shape = shape
        self._decodes = decodes
        self._decode_lists = decode_lists
        self._variant = variant
        self._scratch = scratch
        self._chunks = chunks

    def __call__(self, layer: int, heads: Heads) -> torch.Tensor:
        q = append(self._pages(layer), heads, self._slots)
        out = torch.empty_like(q)
        self.over_pages(layer, q, out)
        return out

    def over_pages(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """Attention of rotated q[T, heads, D] into `out`; K and V are in their pages already."""
        pages = self._pages(layer)
        if self._decodes:
            items, merges = self._decode_lists[pages.window]
            assert self._scratch is not None
            # A decode's items hold only keys that it sees, windows and all: nothing is masked.
            attend.attend(
                q, pages.keys, pages.values, pages.table, items, merges, out, self._scratch, self._shape,
                self._variant, causal=False, scales=pages.scales,
            )  # fmt: skip
        for chunk in self._chunks:
            chunk.run(q, pages, out)


def append(pages: Pages, heads: Heads, slots: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Rotated queries of a layer, in `out` if given; its K and V go to their pages."""
    return kernels.append(
        heads.qkv, heads.cos, heads.sin, slots, pages.keys, pages.values, heads.num_heads, heads.norms, heads.eps,
        pages.scales, out,
    )  # fmt: skip
