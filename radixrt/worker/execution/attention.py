"""Paged attention in plain torch: for CPUs, and as the reference of the GPU kernels in `cuda/`."""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
import torch
from torch.nn import functional as F

from radixrt.worker.execution.kv_pool import KVPool
from radixrt.worker.model.layers import sparse
from radixrt.worker.model.layers._cpu_kernels import attend as kernel_attend
from radixrt.worker.model.layers.indexer import Index
from radixrt.worker.model.layers.latent import LatentHeads
from radixrt.worker.model.layers.mixers import Projected
from radixrt.worker.plan import Plan

DIM_ALIGNMENT = 16
"""The kernel for single queries needs heads whose elements are a multiple of this."""


class TorchAttention:
    """Computes one request after the other, and reads the page table in place.

    q positions      start ......... start + count - 1
    k positions  0 ..................................   a query at p sees (p - window, p], or with `chunked`
                                                        [p - p % window, p]

    `windows` and `sinks` (see `AttentionSpec.sinks`) are given by layer. With `top_k`, there are indexers, which select
    the tokens that are seen (see `layers.indexer`).
    """

    exact = False
    """Whether the result for a query does not depend on the batch."""

    def __init__(
        self,
        pool: KVPool,
        page_size: int,
        windows: tuple[int | None, ...],
        scale: float | None = None,
        sinks: tuple[torch.Tensor | None, ...] | None = None,
        cap: float | None = None,
        chunked: bool = False,
        top_k: int = 0,
    ) -> None:
        """`scale` multiplies the scores; None: head_dim^-0.5. `cap`: see `AttentionSpec.score_cap`; `chunked`: see
        `AttentionSpec.chunked`."""
        self.pool = pool
        self._page_size = page_size
        self._windows = windows
        self._scale = pool.head_dim**-0.5 if scale is None else scale
        self._sinks = sinks or (None,) * len(windows)
        self.top_k = top_k
        self._cap = cap
        self._chunked = chunked
        self._threads = torch.get_num_threads()
        self.fuses = not self.exact and cap is None and all(x is None for x in self._sinks) and _is_for_kernel(pool)
        """Whether single queries are for `single`."""

    def bind(self, table: np.ndarray) -> None:
        self._table = table

    def begin(self, plan: Plan, device: torch.device) -> TorchStep:
        """The attention of a step's tokens, of which only rows, starts, counts and slots matter."""
        return SparseStep(self, plan, device) if self.top_k else TorchStep(self, plan, device)

    def slots(self, row: int, tokens: int) -> np.ndarray:
        """int64[tokens]: slots of the first `tokens` tokens of a row."""
        size = self._page_size
        pages = self._table[row, : -(-tokens // size)].astype(np.int64)
        return pages if size == 1 else (pages[:, None] * size + np.arange(size)).reshape(-1)[:tokens]

    def first_key(self, layer: int, position: int) -> int:
        """The first position that a query at `position` sees."""
        return first_key(position, self._windows[layer], self._chunked)

    def single(self, layer: int, q: torch.Tensor, slots: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        """Attention of the last token of each of R sequences: [R, heads, D] for q[R, heads, D], by a kernel for CPUs
        that reads the pages in place. A sequence's tokens are at int64 slots[bounds[i] : bounds[i + 1]]."""
        q, (k, v) = q.contiguous(), self.pool.stored(layer)
        out = torch.empty_like(q)
        count, heads, dim = q.shape
        at = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), slots.data_ptr(), bounds.data_ptr()
        kernel_attend(*at, count, heads, k.shape[1], dim, self._scale, self._threads)
        return out

    def one(self, layer: int, q: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Attention of the last tokens of one sequence over all of it: [count, heads, width of V] for q[count, heads,
        D] and the sequence's slots. On a CPU, a token whose K or V is not finite leaves the tokens before it as they
        are."""
        out = self._one(layer, q, slots)
        # On a GPU the host would wait. A sum is the fastest look for NaN; it overflows seldom, and then costs time.
        if len(q) > 1 and not out.is_cuda and not math.isfinite(out.sum()):
            self._mend(layer, q, slots, out)
        return out

    def _mend(self, layer: int, q: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
        """Compute results that are NaN again, each over the tokens that its query sees, and no others: the masked ones
        have weight 0, but 0 times NaN is NaN."""
        lost = out.flatten(1).isnan().any(1).nonzero().flatten().tolist()
        for query in lost:
            seen = slots[: len(slots) - len(q) + query + 1]
            out[query] = self._one(layer, q[query : query + 1], seen)[0]

    def _one(self, layer: int, q: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        count, end, window = len(q), len(slots), self._windows[layer]
        first = first_key(end - count, window, self._chunked)
        k, v = self.pool.read(layer, slots[first:], q.dtype)
        mask = None
        if count > 1:
            at = torch.arange(end - count, end, device=q.device)[:, None]
            keys = torch.arange(first, end, device=q.device)
            mask = (keys <= at) & (keys >= first_key(at, window, self._chunked))
        return attend(q, k, v, mask, self._scale, self._sinks[layer], self._cap)

    def of_selected(self, layer: int, q: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Attention of each query to tokens of its own: [count, heads, rank] for q[count, heads, D] and slots[count,
        top_k]."""
        assert self.pool.latent is not None
        each = 1 if self.exact else sparse.at_once(q.device, slots.shape[1] * q.shape[-1])
        parts = []
        for some, selected in zip(q.split(each), slots.split(each), strict=True):
            k, _ = self.pool.read(layer, selected.flatten(), q.dtype)
            k = k.squeeze(1).unflatten(0, selected.shape)
            parts.append(sparse.attend(some, k, self.pool.latent, self._scale))
        return torch.cat(parts)


def _is_for_kernel(pool: KVPool) -> bool:
    """Whether the kernel for single queries can read these pages."""
    plain = type(pool) is KVPool and pool.latent is None and pool.dtype == torch.float32
    return plain and pool.device.type == "cpu" and pool.head_dim % DIM_ALIGNMENT == 0


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None = None,
    cap: float | None = None,
) -> torch.Tensor:
    """Attention: [T, heads, width of V] for q[T, heads, D] over k, v [L, kv_heads, D], under the bool mask[T, L] (True:
    visible; None: all are). A model has `sinks` [heads] or a `cap`, or neither."""
    if sinks is not None:
        return _with_sinks(q, k, v, mask, scale, sinks)
    if cap is not None:
        return _with_cap(q, k, v, mask, scale, cap)
    if k.shape[1] == 1:
        return _of_one_head(q, k, v, mask, scale)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def _of_one_head(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """`attend` with one KV head: all heads' queries are stacked, so that the keys are not repeated for each."""
    count, heads, _ = q.shape
    mask = None if mask is None else mask.repeat_interleave(heads, 0)
    q, k, v = q.flatten(0, 1)[None, None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out[0, 0].unflatten(0, (count, heads))


QUERIES_AT_ONCE = 64
"""Queries that are computed at once where there is a number for each pair of a query and a key, [heads, queries,
keys]."""


def _with_cap(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, cap: float
) -> torch.Tensor:
    """`attend` with capped scores (see `capped`)."""
    kv_heads, parts = k.shape[1], []
    keys, values = k.permute(1, 2, 0), v.transpose(0, 1)
    for begin in range(0, len(q), QUERIES_AT_ONCE):
        part = q[begin : begin + QUERIES_AT_ONCE].unflatten(1, (kv_heads, -1)).transpose(0, 1)
        scores = capped((part.flatten(1, 2) @ keys).float() * scale, cap).unflatten(1, part.shape[1:3])
        if mask is not None:
            scores.masked_fill_(~mask[begin : begin + part.shape[1], None], -torch.inf)
        out = scores.softmax(-1).to(v.dtype).flatten(1, 2) @ values
        parts.append(out.unflatten(1, part.shape[1:3]).transpose(0, 1).flatten(1, 2))
    return torch.cat(parts)


def capped(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Soft-capping (Gemma 2, arXiv 2408.00118, section 2): cap tanh(x / cap), in place."""
    return x.div_(cap).tanh_().mul_(cap)


def _with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, sinks: torch.Tensor
) -> torch.Tensor:
    """`attend` with sinks.

    `sinks` [heads] are the scores of one more key whose value is 0. It is appended as a zero key, and the additive mask
    gives it its score."""
    k, v = (torch.cat((x, torch.zeros_like(x[:1]))).transpose(0, 1)[None] for x in (k, v))
    parts = []
    for begin in range(0, len(q), QUERIES_AT_ONCE):
        part = q[begin : begin + QUERIES_AT_ONCE]
        added = torch.zeros((q.shape[1], len(part), k.shape[2]), dtype=q.dtype, device=q.device)
        if mask is not None:
            added[..., :-1].masked_fill_(~mask[begin : begin + len(part)], -torch.inf)
        added[..., -1] = sinks[:, None]
        part = part.transpose(0, 1)[None]
        out = F.scaled_dot_product_attention(part, k, v, attn_mask=added[None], scale=scale, enable_gqa=True)
        parts.append(out[0])
    return torch.cat(parts, 1).transpose(0, 1)


class TorchStep:
    """The attention of one step."""

    def __init__(self, attention: TorchAttention, plan: Plan, device: torch.device) -> None:
        self._attention = attention
        self._written = torch.from_numpy(plan.slots).to(device, torch.int64)
        self._counts = plan.counts.tolist()
        self._ends = (plan.starts + plan.counts).tolist()
        self._slots = [
            torch.from_numpy(attention.slots(row, end)).to(device)
            for row, end in zip(plan.rows.tolist(), self._ends, strict=True)
        ]
        more = np.flatnonzero(plan.counts > 1)
        self._singles = (int(more[0]) if len(more) else len(plan.counts)) if attention.fuses else 0
        """How many of the first requests have one token each, and are computed together."""
        self._visible: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        """By the first positions that these see: their slots, and the bounds of each one's."""

    def __call__(self, layer: int, heads: Projected) -> torch.Tensor:
        q, k, v = heads.split()
        if k is not None and v is not None:
            self._attention.pool.write(layer, self._written, k, v)
        return heads.value_projection(self.over_pages(layer, q))

    def over_pages(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """[T, heads, width of V] for q[T, heads, D], when K and V of the step are written to their pages."""
        count = self._singles
        found = [self._attention.single(layer, q[:count], *self._seen(layer))] if count else []
        if count < len(self._counts):
            parts = zip(q[count:].split(self._counts[count:]), self._slots[count:], strict=True)
            found += [self._attention.one(layer, part, slots) for part, slots in parts]
        return torch.cat(found) if len(found) > 1 else found[0]

    def _seen(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What single queries see in a layer: see `_visible`."""
        firsts = tuple(self._attention.first_key(layer, end - 1) for end in self._ends[: self._singles])
        if firsts not in self._visible:
            seen = [slots[first:] for slots, first in zip(self._slots, firsts, strict=False)]
            bounds = np.cumsum([0, *map(len, seen)], dtype=np.int64)
            self._visible[firsts] = torch.cat(seen), torch.from_numpy(bounds)
        return self._visible[firsts]


class SparseStep(TorchStep):
    """The attention of one step, to the tokens that indexers select.

    q positions      start ......... top_k - 1 | top_k .........
    k positions            all up to the query | the selected ones
    """

    def __init__(self, attention: TorchAttention, plan: Plan, device: torch.device) -> None:
        super().__init__(attention, plan, device)
        self._dense = np.clip(attention.top_k - plan.starts, 0, plan.counts).tolist()
        """By request: the first queries, which attend to all tokens."""
        self._selected: list[torch.Tensor] = []
        """By request: the slots that the other queries attend to, int64[queries, top_k], in the layers that follow."""

    def __call__(self, layer: int, heads: Projected) -> torch.Tensor:
        assert isinstance(heads, LatentHeads)
        q, k, v = heads.split()
        self._attention.pool.write(layer, self._written, k, v)
        if heads.index is not None:
            self._select(heads.index)
        parts = zip(q.split(self._counts), self._slots, self._dense, self._selected, strict=True)
        return heads.value_projection(torch.cat([self._one(layer, *part) for part in parts]))

    def _select(self, index: Index) -> None:
        attention, number = self._attention, index.indexer.number
        pool = attention.pool.index
        assert pool is not None
        pool.write(number, self._written, index.keys())
        self._selected = [slots[:0, None] for slots in self._slots]
        if self._dense == self._counts:
            return
        parts = zip(*(x.split(self._counts) for x in index.queries()), self._slots, self._dense, strict=True)
        for request, (q, weights, slots, dense) in enumerate(parts):
            if dense < len(q):
                chosen = sparse.select(
                    q[dense:], weights[dense:], pool.read(number, slots), attention.top_k, attention.exact
                )
                self._selected[request] = slots[chosen]

    def _one(
        self, layer: int, q: torch.Tensor, slots: torch.Tensor, dense: int, selected: torch.Tensor
    ) -> torch.Tensor:
        parts = []
        if dense:
            parts.append(self._attention.one(layer, q[:dense], slots[: len(slots) - len(q) + dense]))
        if dense < len(q):
            parts.append(self._attention.of_selected(layer, q[dense:], selected))
        return torch.cat(parts)


Positions = TypeVar("Positions", int, torch.Tensor)


def first_key(position: Positions, window: int | None, chunked: bool = False) -> Positions:
    """The first position that a query at `position`, a number or a tensor of some, sees."""
    if window is None:
        return position * 0
    if chunked:
        return position - position % window
    return max(0, position - window + 1) if isinstance(position, int) else (position - window + 1).clamp(min=0)


class BatchInvariantAttention(TorchAttention):
    """Attention whose result for a query does not depend, to the last bit, on what else is in the batch.

    The rounding of a matrix product depends on its shape, so all have the same shape: queries go in tiles of QUERIES,
    keys in blocks of KEYS that start at multiples of KEYS, and blocks are merged from left to right as in online
    softmax (arXiv 1805.02867). Masked keys have weight exactly 0, so tiles may begin at any query.
    """

    exact = True
    QUERIES = 8
    KEYS = 128
    MASKED = -1e30

    def _one(self, layer: int, q: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        count, heads, _ = q.shape
        end, window = len(slots), self._windows[layer]
        start = end - count
        first = first_key(start, window, self._chunked) // self.KEYS * self.KEYS
        k, v = (_blocks(x, self.KEYS) for x in self.pool.read(layer, slots[first:], q.dtype))
        kv_heads = k.shape[1]
        tiles = _tiles(q, self.QUERIES, kv_heads)
        at = torch.arange(start, start + len(tiles) * self.QUERIES, device=q.device).view(-1, 1, self.QUERIES, 1)
        at = at.repeat_interleave(heads // kv_heads, dim=2)
        state = _Softmax(tiles, v.shape[-1], self._scale, self.MASKED, self._start(layer, kv_heads), self._cap)
        for block in range(len(k)):
            keys = torch.arange(self.KEYS, device=q.device) + (first + block * self.KEYS)
            reached = max(0, (first + block * self.KEYS - start) // self.QUERIES)
            hidden = keys > at[reached:]
            if window is not None:
                hidden |= keys < first_key(at[reached:], window, self._chunked)
            state.add(reached, k[block], v[block], hidden)
        out = state.result().view(len(tiles), kv_heads, self.QUERIES, -1, v.shape[-1]).transpose(1, 2)
        return out.reshape(-1, heads, v.shape[-1])[:count].to(q.dtype)

    def _start(self, layer: int, kv_heads: int) -> torch.Tensor | None:
        """float32[kv_heads, rows of a tile]: the sinks, as initial scores of the softmax; None without sinks."""
        if (sinks := self._sinks[layer]) is None:
            return None
        return sinks.view(kv_heads, 1, -1).expand(-1, self.QUERIES, -1).flatten(1)


def _blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    """[L, kv_heads, D] as [blocks, kv_heads, size, D], padded with zeros."""
    x = F.pad(x, (0, 0, 0, 0, 0, -len(x) % size))
    return x.unflatten(0, (-1, size)).transpose(1, 2).contiguous()


def _tiles(q: torch.Tensor, size: int, kv_heads: int) -> torch.Tensor:
    """[count, heads, D] as [tiles, kv_heads, size * group, D], padded with zeros."""
    q = F.pad(q, (0, 0, 0, 0, 0, -len(q) % size))
    q = q.unflatten(0, (-1, size)).unflatten(2, (kv_heads, -1))
    return q.transpose(1, 2).flatten(2, 3).contiguous()


class _Softmax:
    """State of an online softmax in float32: running maximum, sum of weights, and weighted sum of values of `width`,
    for each of [tiles, kv_heads, rows]. It starts empty, or with the scores of sinks, float32[kv_heads, rows]."""

    def __init__(
        self, q: torch.Tensor, width: int, scale: float, masked: float, sinks: torch.Tensor | None, cap: float | None
    ) -> None:
        self._q = q
        self._masked = masked
        self._scale = scale
        self._cap = cap
        self._peak = torch.full(q.shape[:-1], masked, device=q.device)
        self._sum = torch.zeros(q.shape[:-1], device=q.device)
        if sinks is not None:
            self._peak.copy_(sinks.expand_as(self._peak))
            self._sum.fill_(1)
        self._values = torch.zeros((*q.shape[:-1], width), device=q.device)

    def add(self, first: int, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add a block of keys, [kv_heads, KEYS, D], to the tiles from `first` on; `hidden` is True where masked."""
        scores = (self._q[first:] @ k.transpose(-1, -2)).float() * self._scale
        if self._cap is not None:
            capped(scores, self._cap)
        scores.masked_fill_(hidden, self._masked)
        peak = torch.maximum(self._peak[first:], scores.amax(-1))
        weights = (scores - peak[..., None]).exp()
        keep = (self._peak[first:] - peak).exp()
        self._peak[first:] = peak
        self._sum[first:] = self._sum[first:] * keep + weights.sum(-1)
        self._values[first:] = self._values[first:] * keep[..., None] + (weights.to(v.dtype) @ v).float()

    def result(self) -> torch.Tensor:
        return self._values / self._sum[..., None]
