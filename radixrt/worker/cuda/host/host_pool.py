"""Copies pages and recurrent states between a GPU and pinned host memory beside the work of steps.

    pages of the GPU   --gather--> |         | --copy engine--> slots in host memory
                                   | staging |
                       <-scatter-- |         | <-copy engine--

    recurrent states   ---copy---> | staging | --copy engine--> slots of states in host memory
                       <------------------------copy engine---

A page is spread over all layers, a slot is contiguous: kernels collect pages in a buffer, and a stream of its own
copies the buffer, slots that follow each other at once. A state is contiguous on the GPU, too, but its slot there is
written by the very step that it makes room for: the buffer has a copy of it until that is on the host. Steps wait for
what they read, not for what they leave behind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.host.pinned import PinnedMemory
from radixrt.worker.execution.host_pool import HostPool
from radixrt.worker.execution.kv_pool import KVPool, StatePool
from radixrt.worker.execution.sampler import to_device
from radixrt.worker.plan import Moves

if TYPE_CHECKING:
    from radixrt.worker.parallel.group import TorchGroup

STAGING_BYTES = 512 << 20
"""Memory of the GPU that staging takes: what steps of 8,192 tokens of a model of 8B evict need not wait."""
PARTS = 8
"""Of staging: while one is filled, others are copied."""
_WORDS = 1024
"""Words that a program copies."""


@triton.jit
def _copy_kernel(
    planes_ptr, rows_ptr, pages_ptr, offset, num_planes, plane_stride, row_stride, words,
    OUT: tl.constexpr, PLANES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    page = tl.load(pages_ptr + row).to(tl.int64)
    plane = (tl.program_id(1) * PLANES + tl.arange(0, PLANES))[:, None]
    word = (tl.program_id(2) * WORDS + tl.arange(0, WORDS))[None, :]
    mask = (plane < num_planes) & (word < words)
    there = planes_ptr + plane.to(tl.int64) * plane_stride + page * words + word
    here = rows_ptr + row * row_stride + offset + plane * words + word
    if OUT:
        tl.store(here, tl.load(there, mask=mask), mask=mask)
    else:
        tl.store(there, tl.load(here, mask=mask), mask=mask)


def copy_rows(planes: list[torch.Tensor], rows: torch.Tensor, pages: torch.Tensor, out: bool) -> None:
    """Copy pages to rows (`out`), or rows to pages: rows[N, words of a page], pages int32[N], planes as those of
    `KVPool.planes`, all of the same dtype."""
    offset = 0
    for x in planes:
        num_planes, _, words = x.shape
        width = min(_WORDS, triton.next_power_of_2(words))
        height = min(_WORDS // width, triton.next_power_of_2(num_planes))
        grid = len(pages), triton.cdiv(num_planes, height), triton.cdiv(words, width)
        _copy_kernel[grid](
            x, rows, pages, offset, num_planes, x.stride(0), rows.stride(0), words, OUT=out, PLANES=height, WORDS=width
        )
        offset += num_planes * words


class CudaHostPool(HostPool):
    """A HostPool in page-locked memory."""

    def __init__(
        self,
        pool: KVPool,
        page_size: int,
        memory: PinnedMemory,
        group: TorchGroup | None = None,
        states: StatePool | None = None,
        most_states: int = 0,
    ) -> None:
        super().__init__(pool, page_size, memory.wait(), group, states, most_states)
        self._memory = memory
        self._device = pool.device
        words = self._host.shape[1]
        self._most = max(1, STAGING_BYTES // PARTS // (words * self._host.itemsize))
        """Pages of a part of staging."""
        self._staging = torch.empty((PARTS, self._most, words), dtype=self._host.dtype, device=self._device)
        self._stream = torch.cuda.Stream(self._device)
        self._free = [torch.cuda.Event() for _ in range(PARTS)]
        self._full = [torch.cuda.Event() for _ in range(PARTS)]
        self._begun, self._arrived = torch.cuda.Event(), torch.cuda.Event()
        self._next = 0

    def settled(self) -> Callable[[], bool]:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event.query

    def arrive(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._arrived)

    @torch.inference_mode()
    def move(self, moves: Moves, wait: bool = True) -> None:
        steps, copies, host = torch.cuda.current_stream(self._device), self._stream, self._host
        for pages, slots in _parts(moves.offload, by=1, most=self._most):
            staging, free, full = self._part()
            steps.wait_event(free)
            copy_rows(self._planes, staging, to_device(pages, self._device), out=True)
            full.record(steps)
            with torch.cuda.stream(copies):
                copies.wait_event(full)
                for first, start, count in _runs(slots):
                    host[first : first + count].copy_(staging[start : start + count], non_blocking=True)
                free.record(copies)
        for source, slot in moves.states_offload.T.tolist():
            for states, there in self._state_parts(slot):
                self._leave(states[source], there)
        # Pages and states are written when the step before has ended, and what was in them has been copied.
        self._begun.record(steps)
        for slots, pages in _parts(moves.onload, by=0, most=self._most):
            staging, free, full = self._part()
            with torch.cuda.stream(copies):
                to = to_device(pages, self._device)
                copies.wait_event(free)
                for first, start, count in _runs(slots):
                    staging[start : start + count].copy_(host[first : first + count], non_blocking=True)
                copies.wait_event(self._begun)
                copy_rows(self._planes, staging, to, out=False)
                free.record(copies)
        with torch.cuda.stream(copies):
            copies.wait_event(self._begun)
            for slot, target in moves.states_onload.T.tolist():
                for states, there in self._state_parts(slot):
                    states[target].copy_(there, non_blocking=True)
        if moves.fills:
            self._arrived.record(copies)
            if wait:
                self.arrive()

    def _leave(self, source: torch.Tensor, there: torch.Tensor) -> None:
        """Copy uint8[bytes] of the GPU to as many of host memory, a part of staging at a time."""
        steps, copies = torch.cuda.current_stream(self._device), self._stream
        size = self._staging[0].nbytes
        for piece, to in zip(source.split(size), there.split(size), strict=True):
            staging, free, full = self._part()
            here = staging.view(torch.uint8).flatten()[: len(piece)]
            steps.wait_event(free)
            here.copy_(piece)
            full.record(steps)
            with torch.cuda.stream(copies):
                copies.wait_event(full)
                to.copy_(here, non_blocking=True)
                free.record(copies)

    def _part(self) -> tuple[torch.Tensor, torch.cuda.Event, torch.cuda.Event]:
        self._next = part = (self._next + 1) % PARTS
        return self._staging[part], self._free[part], self._full[part]


def _parts(pairs: np.ndarray, by: int, most: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pairs in the order of one side, at most `most` at a time."""
    pairs = pairs[:, np.argsort(pairs[by])]
    first, second = pairs
    return [
        (np.ascontiguousarray(first[i : i + most]), np.ascontiguousarray(second[i : i + most]))
        for i in range(0, len(first), most)
    ]


def _runs(slots: np.ndarray) -> list[tuple[int, int, int]]:
    """(first slot, index of it, count) of slots that follow each other."""
    starts = np.flatnonzero(np.diff(slots, prepend=slots[0] - 2) != 1)
    counts = np.diff(starts, append=len(slots))
    return list(zip(slots[starts].tolist(), starts.tolist(), counts.tolist(), strict=True))
