"""Chunks by FlashInfer's FA3 kernels over contiguous K and V; each chunk reads its own keys.

pages, FP8 or not --gather--> workspace [tokens, kv_heads, D], activations' dtype --FA3--> out
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from radixrt.worker.cuda.attention import attend
from radixrt.worker.cuda.attention.chunks import Sequences
from radixrt.worker.cuda.attention.pages import Pages
from radixrt.worker.cuda.attention.sinks import add_sinks
from radixrt.worker.cuda.attention.variants import Shape
from radixrt.worker.cuda.attention.work import MERGE_FIELDS
from radixrt.worker.cuda.elementwise import kernels
from radixrt.worker.cuda.elementwise.staging import PackedArray, Packer
from radixrt.worker.cuda.flashinfer_builds import FA3_HEAD_DIMS, load_flashinfer


class FlashInfer:
    """FlashInfer's ragged prefill kernels, and the workspace they read K and V from.

    A wrapper keeps its plan in pinned memory that the device reads later, so it must not be planned again before the
    step that uses it has ended: even and odd steps have wrappers of their own. Raises RuntimeError if FA3 does not
    support the head size, or FlashInfer cannot be imported."""

    WORKSPACE = 256 << 20
    """Bytes of the buffer that FlashInfer itself needs."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, tokens: int, backend: str) -> None:
        if backend == "fa3" and shape.head_dim not in FA3_HEAD_DIMS:
            raise RuntimeError(f"FA3 has kernels for heads of {FA3_HEAD_DIMS}, not of {shape.head_dim}")
        self._flashinfer = load_flashinfer()
        self._shape = shape
        self._dtype = dtype
        self._backend = backend
        self._buffer = torch.empty(self.WORKSPACE, dtype=torch.uint8, device=device)
        self.tokens = tokens
        """The most tokens whose K and V fit the workspace: those of a group of sequences together."""
        size = (tokens, shape.kv_heads, shape.head_dim)
        self.workspace = torch.empty(size, dtype=dtype, device=device), torch.empty(size, dtype=dtype, device=device)
        self._wrappers: dict[tuple[int, int], Any] = {}
        """Their class has no types."""
        self._planned: dict[object, tuple[object, ...]] = {}

    def try_out(self, windows: set[int | None]) -> None:
        """Run the kernels once, after building them if nobody has. Any exception means that they cannot be used."""
        shape = self._shape
        counts = np.array([3, 130])
        q = torch.zeros((133, shape.heads, shape.head_dim), dtype=self._dtype, device=self._buffer.device)
        k, v = (x[:400].zero_() for x in self.workspace)
        for window in windows:
            wrapper = self.wrapper(0, 0)
            self.plan(wrapper, counts, np.array([100, 300]), window)
            wrapper.run(q, k, v, out=torch.empty_like(q))
        # Parts are rare (`chunk_plan`): the kernel that merges them is compiled here, not when the first are served.
        lse = torch.zeros(q.shape[:2], dtype=torch.float32, device=q.device)
        nothing = torch.zeros((1, MERGE_FIELDS), dtype=torch.int32, device=q.device)
        sinks = torch.zeros(shape.heads, device=q.device) if shape.sinks else None
        if sinks is not None:
            add_sinks(torch.zeros_like(q), lse, sinks)
        attend.merge((q, lse), nothing, nothing[0], torch.empty_like(q), shape, sinks=sinks)
        torch.cuda.synchronize(self._buffer.device)

    def wrapper(self, parity: int, number: int) -> Any:
        """The `number`-th wrapper of a step; even and odd steps (`parity`) have their own."""
        key = parity, number
        if key not in self._wrappers:
            self._wrappers[key] = self._flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
                self._buffer, kv_layout="NHD", backend=self._backend
            )
        return self._wrappers[key]

    def plan(self, wrapper: Any, counts: np.ndarray, keys: np.ndarray, window: int | None, causal: bool = True) -> None:
        """Plan a wrapper for sequences with `counts` queries that are the last of `keys` keys (or see all of them, if
        not `causal`); nothing happens if that is its plan already. These are host arrays: nothing waits for the
        device."""
        asked = counts.tolist(), keys.tolist(), window, causal
        if self._planned.get(wrapper) == asked:
            return
        shape = self._shape
        self._planned.pop(wrapper, None)  # in case the plan fails
        wrapper.plan(
            qo_indptr=_starts(counts),
            kv_indptr=_starts(keys),
            num_qo_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim_qk=shape.head_dim,
            causal=causal,
            sm_scale=shape.scale,
            logits_soft_cap=shape.cap,
            window_left=-1 if window is None else window - 1,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        self._planned[wrapper] = asked


def _starts(counts: np.ndarray) -> torch.Tensor:
    """int32[n + 1] on the host: cumulative sums, from 0."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences whose keys fit the workspace together, for the layers of one window."""

    queries: slice
    sequences: PackedArray
    """int32[S, 4], as `kernels.gather` takes it."""
    longest: int
    """Keys to gather for the longest sequence."""
    total: int
    """Keys to gather in all."""
    wrapper: Any


class RaggedStep:
    """A ChunkStep that computes sequences in groups that fit the workspace. For layers with a window, keys that no
    query of a sequence sees are not gathered."""

    def __init__(
        self, sequences: Sequences, windows: set[int | None], packer: Packer, flashinfer: FlashInfer, parity: int,
        page_size: int,
    ) -> None:  # fmt: skip
        self._flashinfer = flashinfer
        self._page_size = page_size
        self._groups: dict[int | None, list[_Group]] = {window: [] for window in windows}
        number = 0
        ends = sequences.starts.astype(np.int64) + sequences.counts
        for group in _groups(ends, sequences, flashinfer.tokens):
            part = sequences.take(group)
            first = int(part.queries[0])
            queries = slice(first, first + int(part.counts.sum()))
            for window, planned in self._groups.items():
                end = ends[group]
                keys = end if window is None else np.minimum(end, part.counts + window - 1)
                where = np.stack([part.rows, end - keys, keys, np.cumsum(keys) - keys], axis=1).astype(np.int32)
                wrapper = flashinfer.wrapper(parity, number)
                flashinfer.plan(wrapper, part.counts, keys, window)
                planned.append(_Group(queries, packer.add(where), int(keys.max()), int(keys.sum()), wrapper))
                number += 1

    def sent(self, integers: torch.Tensor) -> None:
        self._sent = integers

    def run(self, q: torch.Tensor, pages: Pages, out: torch.Tensor) -> None:
        for group in self._groups[pages.window]:
            k, v = (x[: group.total] for x in self._flashinfer.workspace)
            kernels.gather(
                pages.keys, pages.values, pages.table, self._page_size, group.sequences.of(self._sent), group.longest,
                (k, v), pages.scales,
            )  # fmt: skip
            mine, asked, wrapper = out[group.queries], q[group.queries], group.wrapper
            if pages.sinks is None:
                wrapper.run(asked, k, v, out=mine)
                continue
            lse = torch.empty(mine.shape[:2], dtype=torch.float32, device=q.device)
            wrapper.run(asked, k, v, out=mine, lse=lse, return_lse=True)
            add_sinks(mine, lse, pages.sinks)


def _groups(keys: np.ndarray, sequences: Sequences, room: int) -> Iterator[np.ndarray]:
    """Runs of sequences whose queries are contiguous and whose keys fit `room`."""
    begin, total = 0, 0
    for i in range(len(keys)):
        apart = i > begin and sequences.queries[i] != sequences.queries[i - 1] + sequences.counts[i - 1]
        if i > begin and (apart or total + keys[i] > room):
            yield np.arange(begin, i)
            begin, total = i, 0
        total += int(keys[i])
    yield np.arange(begin, len(keys))
