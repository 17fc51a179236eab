"""Attention over pages: plain torch, which a CPU runs and which is the reference, and FlashInfer's kernels for GPUs."""

from __future__ import annotations

import logging
from typing import Protocol

import numpy as np
import torch
from torch.nn import functional as F

from radixrt.worker.kv import KVPool
from radixrt.worker.model.decoder import Attend
from radixrt.worker.model.spec import ModelSpec
from radixrt.worker.plan import Plan

log = logging.getLogger("radixrt.attention")

BACKENDS = ("auto", "flashinfer", "torch")


class Attention(Protocol):
    """Attention of one runner over its pool."""

    def bind(self, table: np.ndarray) -> None:
        """`table` is int32[rows, pages], which the scheduler goes on writing."""

    def begin(self, plan: Plan, device: torch.device) -> Attend:
        """The attention of one step."""


def choose(backend: str, pool: KVPool, page_size: int, spec: ModelSpec, dtype: torch.dtype, exact: bool) -> Attention:
    """By name; `auto` is FlashInfer on a GPU, if it is installed, else torch. `exact`: independent of the batch.

    ValueError for no known name, or for FlashInfer where it cannot be."""
    if backend not in BACKENDS:
        raise ValueError(f"attention_backend {backend!r}: expected one of {', '.join(BACKENDS)}")
    on_gpu = pool.device.type == "cuda"
    if exact or backend == "torch" or (backend == "auto" and not on_gpu):
        if exact and backend == "flashinfer":
            log.warning("deterministic: attention by torch, for FlashInfer's kernels depend on the batch")
        return (BatchInvariantAttention if exact else TorchAttention)(pool, page_size, spec.windows)
    try:
        return FlashInferAttention(pool, page_size, spec, dtype)
    except ImportError as error:
        if backend == "flashinfer":
            raise ValueError(f"attention_backend: FlashInfer cannot be imported: {error}") from error
        log.warning("FlashInfer is not installed (pip install 'radixrt[cuda]'): attention by torch, slower")
        return TorchAttention(pool, page_size, spec.windows)


class TorchAttention:
    """Reads the page table in place; one request after the other.

    q positions      start ......... start + count - 1
    k positions  0 ..................................   a query at p sees (p - window, p]
    """

    def __init__(self, pool: KVPool, page_size: int, windows: tuple[int | None, ...]) -> None:
        self._pool = pool
        self._page_size = page_size
        self._windows = windows

    def bind(self, table: np.ndarray) -> None:
        self._table = table

    def begin(self, plan: Plan, device: torch.device) -> Attend:
        written = torch.from_numpy(plan.slots).to(device, torch.int64)
        ends = (plan.starts + plan.counts).tolist()
        slots = [
            torch.from_numpy(self._slots(row, end)).to(device)
            for row, end in zip(plan.rows.tolist(), ends, strict=True)
        ]
        counts = plan.counts.tolist()

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self._pool.write(layer, written, k, v)
            parts = [self._one(layer, part, s) for part, s in zip(q.split(counts), slots, strict=True)]
            return torch.cat(parts)

        return attend

    def _slots(self, row: int, tokens: int) -> np.ndarray:
        """int64[tokens]: slots of the first tokens of a row."""
        size = self._page_size
        pages = self._table[row, : -(-tokens // size)].astype(np.int64)
        return pages if size == 1 else (pages[:, None] * size + np.arange(size)).reshape(-1)[:tokens]

    def _one(self, layer: int, q: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """[count, heads, D]: the last `count` tokens of one sequence over all of it."""
        count, end, window = len(q), len(slots), self._windows[layer]
        first = first_key(end - count, window)
        k, v = self._pool.read(layer, slots[first:], q.dtype)
        mask = None
        if count > 1:
            at = torch.arange(end - count, end, device=q.device)[:, None]
            keys = torch.arange(first, end, device=q.device)
            mask = keys <= at if window is None else (keys <= at) & (keys > at - window)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


def first_key(position: int, window: int | None) -> int:
    """The first position that a query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


class BatchInvariantAttention(TorchAttention):
    """The same to the last bit for a query, whatever else is computed with it.

    A matrix product rounds by its shape, so all have one shape: queries go in tiles of QUERIES, keys in blocks of KEYS
    that start at multiples of KEYS, and blocks are merged from left to right as in online softmax (arXiv 1805.02867).
    What is masked weighs exactly nothing, so a tile may be cut anywhere.
    """

    QUERIES = 8
    KEYS = 128
    MASKED = -1e30

    def _one(self, layer: int, q: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        count, heads, dim = q.shape
        end, window = len(slots), self._windows[layer]
        start = end - count
        first = first_key(start, window) // self.KEYS * self.KEYS
        k, v = (_blocks(x, self.KEYS) for x in self._pool.read(layer, slots[first:], q.dtype))
        kv_heads = k.shape[1]
        tiles = _tiles(q, self.QUERIES, kv_heads)
        at = torch.arange(start, start + len(tiles) * self.QUERIES, device=q.device).view(-1, 1, self.QUERIES, 1)
        at = at.repeat_interleave(heads // kv_heads, dim=2)
        state = _Softmax(tiles, self.MASKED)
        for block in range(len(k)):
            keys = torch.arange(self.KEYS, device=q.device) + (first + block * self.KEYS)
            reached = max(0, (first + block * self.KEYS - start) // self.QUERIES)
            hidden = keys > at[reached:]
            if window is not None:
                hidden |= keys <= at[reached:] - window
            state.add(reached, k[block], v[block], hidden)
        out = state.result().view(len(tiles), kv_heads, self.QUERIES, -1, dim).transpose(1, 2)
        return out.reshape(-1, heads, dim)[:count].to(q.dtype)


def _blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    """[L, kv_heads, D] as [blocks, kv_heads, size, D], zeros after the end."""
    x = F.pad(x, (0, 0, 0, 0, 0, -len(x) % size))
    return x.unflatten(0, (-1, size)).transpose(1, 2).contiguous()


def _tiles(q: torch.Tensor, size: int, kv_heads: int) -> torch.Tensor:
    """[count, heads, D] as [tiles, kv_heads, size * group, D], zeros after the end."""
    q = F.pad(q, (0, 0, 0, 0, 0, -len(q) % size))
    q = q.unflatten(0, (-1, size)).unflatten(2, (kv_heads, -1))
    return q.transpose(1, 2).flatten(2, 3).contiguous()


class _Softmax:
    """Running maximum, sum and weighted values of [tiles, kv_heads, rows], in float32."""

    def __init__(self, q: torch.Tensor, masked: float) -> None:
        self._q = q
        self._masked = masked
        self._scale = q.shape[-1] ** -0.5
        self._peak = torch.full(q.shape[:-1], masked, device=q.device)
        self._sum = torch.zeros(q.shape[:-1], device=q.device)
        self._values = torch.zeros(q.shape, device=q.device)

    def add(self, first: int, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor) -> None:
        """One block of keys, [kv_heads, KEYS, D], for the tiles from `first` on."""
        scores = (self._q[first:] @ k.transpose(-1, -2)).float() * self._scale
        scores.masked_fill_(hidden, self._masked)
        peak = torch.maximum(self._peak[first:], scores.amax(-1))
        weights = (scores - peak[..., None]).exp()
        keep = (self._peak[first:] - peak).exp()
        self._peak[first:] = peak
        self._sum[first:] = self._sum[first:] * keep + weights.sum(-1)
        self._values[first:] = self._values[first:] * keep[..., None] + (weights.to(v.dtype) @ v).float()

    def result(self) -> torch.Tensor:
        return self._values / self._sum[..., None]


# ---------------------------------------------------------------- FlashInfer


class FlashInferAttention:
    """FlashInfer's paged prefill kernel for everything, a decode being a prefill of one token.

    Planned once a step and kind of layer (windowed or not), from host arrays, so that planning waits for nothing.
    """

    WORKSPACE = 256 << 20
    """Bytes for partial results of split sequences."""

    def __init__(self, pool: KVPool, page_size: int, spec: ModelSpec, dtype: torch.dtype) -> None:
        import flashinfer

        self._pool = pool
        self._page_size = page_size
        self._spec = spec
        self._dtype = dtype
        workspace = torch.empty(self.WORKSPACE, dtype=torch.uint8, device=pool.device)
        self._wrappers = {
            window: flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                float_workspace_buffer=workspace, kv_layout="NHD", backend="fa2"
            )
            for window in dict.fromkeys(spec.windows)
        }

    def bind(self, table: np.ndarray) -> None:
        self._table = table

    def begin(self, plan: Plan, device: torch.device) -> Attend:
        written = torch.from_numpy(plan.slots).to(device, torch.int64)
        self._plan(plan, device)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self._pool.write(layer, written, k, v)
            wrapper = self._wrappers[self._spec.windows[layer]]
            return wrapper.run(q=q, paged_kv_cache=self._pool.pages(layer, self._page_size))

        return attend

    def _plan(self, plan: Plan, device: torch.device) -> None:
        spec, size = self._spec, self._page_size
        ends = plan.starts + plan.counts
        held = -(-ends // size)
        pages = np.concatenate([self._table[row, :n] for row, n in zip(plan.rows.tolist(), held.tolist(), strict=True)])
        for window, wrapper in self._wrappers.items():
            wrapper.plan(
                qo_indptr=_starts(plan.counts),
                paged_kv_indptr=_starts(held),
                paged_kv_indices=torch.from_numpy(pages).to(device),
                paged_kv_last_page_len=torch.from_numpy(ends - (held - 1) * size).int(),
                num_qo_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim_qk=spec.head_dim,
                page_size=size,
                causal=True,
                window_left=-1 if window is None else window - 1,
                q_data_type=self._dtype,
                kv_data_type=self._pool.dtype,
            )


def _starts(counts: np.ndarray) -> torch.Tensor:
    """int32[n + 1] on the host: where each of n pieces begins, and where the last ends."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
