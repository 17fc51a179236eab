"""Latent attention over pages: keys of one head that all queries share, whose first elements are the values. A block of
keys is loaded once, and multiplied twice.

Queries of 16 heads fill the rows of no tile of the tensor cores' best instructions, but keys do: so scores are computed
as keys x queries, and results as latent x queries. Work lists, merges and pages are those of `attend`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from radixrt.worker.cuda import kernels
from radixrt.worker.cuda.kernels import saturated
from radixrt.worker.model.latent import LatentHeads

if TYPE_CHECKING:
    from radixrt.worker.cuda.chunks import Pages

# ---------------------------------------------------------------- attention


@triton.jit
def _scores(k, k_turned, q, q_turned, TURNED: tl.constexpr):
    """[keys, queries] of k[keys, rank] and q[queries, rank]; or [queries, keys]."""
    if TURNED:
        return tl.dot(k_turned, tl.trans(q_turned), tl.dot(k, tl.trans(q)))
    else:
        return tl.dot(q_turned, tl.trans(k_turned), tl.dot(q, tl.trans(k)))


@triton.jit
def _attend_item(
    item, block, q_ptr, k_ptr, table_ptr, order_ptr, out_ptr, partial_ptr, lse_ptr, stride, scale, v_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, RANK: tl.constexpr, PAGE: tl.constexpr,
    CAUSAL: tl.constexpr, ORDERED: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    WIDTH: tl.constexpr, REST: tl.constexpr, HALF_TYPE: tl.constexpr, STAGES: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    WHOLE: tl.constexpr = (WIDTH == RANK) & (REST == DIM - RANK)
    m = tl.arange(0, ROWS)
    n = tl.arange(0, KEYS)
    d = tl.arange(0, WIDTH)
    r = tl.arange(0, REST)
    own = m // GROUP
    head = block * GROUP + m % GROUP
    query = tl.load(item)
    queries = tl.load(item + 1)
    row = tl.load(item + 2).to(tl.int64)
    begin = tl.load(item + 3)
    end = tl.load(item + 4)
    position = tl.load(item + 5)
    partial = tl.load(item + 6)
    direct = tl.load(item + 7)
    real = (own < queries) & (m < QUERIES * GROUP)
    place = query + own
    if ORDERED:
        place = tl.load(order_ptr + place, mask=real, other=0)
    at = place.to(tl.int64) * HEADS + head
    q_at = q_ptr + (at * DIM)[:, None]
    q = tl.load(q_at + d[None, :], mask=real[:, None] & (d < RANK)[None, :], other=0.0)
    q = (q.to(tl.float32) * scale).to(HALF_TYPE)
    q_turned = tl.load(q_at + RANK + r[None, :], mask=real[:, None] & (r < DIM - RANK)[None, :], other=0.0)
    q_turned = (q_turned.to(tl.float32) * scale).to(HALF_TYPE)
    AXIS: tl.constexpr = 0 if TURNED else 1  # that of keys
    peak = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([WIDTH, ROWS] if TURNED else [ROWS, WIDTH], tl.float32)
    for j in tl.range(begin, end, KEYS, num_stages=STAGES):
        key = j + n
        # Lanes past the end read the last key again: what lies there is another's, perhaps NaN.
        known = tl.minimum(key, end - 1)
        if PAGE == 1:
            slot = tl.load(table_ptr + row * stride + known).to(tl.int64)
        else:
            slot = tl.load(table_ptr + row * stride + known // PAGE).to(tl.int64) * PAGE + known % PAGE
        k_at = k_ptr + (slot * DIM)[:, None]
        if WHOLE:
            k = tl.load(k_at + d[None, :]).to(HALF_TYPE)
            k_turned = tl.load(k_at + RANK + r[None, :]).to(HALF_TYPE)
        else:
            k = tl.load(k_at + d[None, :], mask=(d < RANK)[None, :], other=0.0).to(HALF_TYPE)
            k_turned = tl.load(k_at + RANK + r[None, :], mask=(r < DIM - RANK)[None, :], other=0.0).to(HALF_TYPE)
        s = _scores(k, k_turned, q, q_turned, TURNED)
        seen = tl.expand_dims(key < end, 1 - AXIS)
        if CAUSAL:
            seen = seen & (tl.expand_dims(key, 1 - AXIS) <= tl.expand_dims(position + own, AXIS))
        s = tl.where(seen, s, -1e30)
        higher = tl.maximum(peak, tl.max(s, AXIS))
        keep = tl.exp2(peak - higher)
        p = tl.exp2(s - tl.expand_dims(higher, AXIS))
        if CAUSAL:  # a row that sees none of these keys
            p = tl.where(seen, p, 0.0)
        total = total * keep + tl.sum(p, AXIS)
        acc = acc * tl.expand_dims(keep, AXIS)
        peak = higher
        if TURNED:
            acc = tl.dot(tl.trans(k), p.to(HALF_TYPE), acc)
        else:
            acc = tl.dot(p.to(HALF_TYPE), k, acc)
    out = acc * tl.expand_dims(v_scale / tl.where(total > 0, total, 1.0), AXIS)
    to = tl.expand_dims(d, 1 - AXIS)
    stored = tl.expand_dims(real, AXIS) & (to < RANK)
    if direct != 0:
        tl.store(out_ptr + tl.expand_dims(at * RANK, AXIS) + to, out.to(out_ptr.dtype.element_ty), mask=stored)
    else:
        spot = (partial + own).to(tl.int64) * HEADS + head
        tl.store(partial_ptr + tl.expand_dims(spot * RANK, AXIS) + to, out, mask=stored)
        # Where NaN comes in, it stays in: `total` is NaN then, and so is what is stored.
        tl.store(lse_ptr + spot, tl.where(total == 0, -1e30, peak + tl.log2(total)), mask=real)


@triton.jit(do_not_specialize=["stride"])  # else it is compiled anew for a page table of another width
def _attend_latent_kernel(
    q_ptr, k_ptr, table_ptr, items_ptr, starts_ptr, order_ptr, out_ptr, partial_ptr, lse_ptr, stride, scale, v_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, RANK: tl.constexpr, PAGE: tl.constexpr,
    CAUSAL: tl.constexpr, ORDERED: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    WIDTH: tl.constexpr, REST: tl.constexpr, ITEM: tl.constexpr, HALF_TYPE: tl.constexpr, STAGES: tl.constexpr,
    SINGLE: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    # The heads of an item run side by side: they read the same keys.
    block = tl.program_id(0)
    program = tl.program_id(1)
    if SINGLE:
        _attend_item(
            items_ptr + program * ITEM, block, q_ptr, k_ptr, table_ptr, order_ptr, out_ptr, partial_ptr, lse_ptr,
            stride, scale, v_scale, HEADS, GROUP, DIM, RANK, PAGE, CAUSAL, ORDERED, QUERIES, ROWS, KEYS, WIDTH, REST,
            HALF_TYPE, STAGES, TURNED,
        )  # fmt: skip
    else:
        first, last = tl.load(starts_ptr + program), tl.load(starts_ptr + program + 1)
        for number in tl.range(first, last, num_stages=1):
            _attend_item(
                items_ptr + number * ITEM, block, q_ptr, k_ptr, table_ptr, order_ptr, out_ptr, partial_ptr, lse_ptr,
                stride, scale, v_scale, HEADS, GROUP, DIM, RANK, PAGE, CAUSAL, ORDERED, QUERIES, ROWS, KEYS, WIDTH,
                REST, HALF_TYPE, STAGES, TURNED,
            )  # fmt: skip


def launch(
    grid: tuple[int, int, int], again: kernels.Again | None, given: tuple[Any, ...], sizes: tuple[int, ...],
    kinds: tuple[bool, bool, int], tile: tuple[int, int, int, int, bool], fields: int, half: Any, single: bool,
) -> Any:  # fmt: skip
    """See `attend.attend`: tensors and numbers; heads, those of a tile, widths of K and V, page size; whether items are
    masked, whether they have an order, queries of a tile; rows, keys, warps, stages, whether they are turned."""
    rows, keys, warps, stages, turned = tile
    _, _, dim, rank, _ = sizes
    widths = (max(16, triton.next_power_of_2(n)) for n in (rank, dim - rank))
    return kernels.launch(
        _attend_latent_kernel, grid, again, *given, *sizes, *kinds, rows, keys, *widths, fields, half, stages, single,
        turned, num_warps=warps,
    )  # fmt: skip


# ---------------------------------------------------------------- norm of latents, rotation, pages


@triton.jit
def _append_latent_kernel(
    q_ptr, latent_ptr, cos_ptr, sin_ptr, norm_ptr, slots_ptr, out_ptr, k_ptr, eps, scale, q_stride, latent_stride,
    HEADS: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
    TURNED: tl.constexpr, GROUP: tl.constexpr, INTERLEAVED: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    DIM: tl.constexpr = RANK + 2 * HALF
    i = tl.arange(0, TURNED)
    turned = i < HALF
    one = 2 * i if INTERLEAVED else i
    other = one + 1 if INTERLEAVED else i + HALF
    cos = tl.load(cos_ptr + token * HALF + i, mask=turned, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * HALF + i, mask=turned, other=0.0).to(tl.float32)
    dtype = latent_ptr.dtype.element_ty
    if tl.program_id(1) == 0:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        source = latent_ptr + token * latent_stride
        d = tl.arange(0, WIDTH)
        x = tl.load(source + d, mask=d < RANK, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / RANK + eps)
        weight = tl.load(norm_ptr + d, mask=d < RANK, other=0.0).to(tl.float32)
        x = (x.to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)  # rounded where the model rounds
        first = tl.load(source + RANK + one, mask=turned, other=0.0).to(tl.float32)
        second = tl.load(source + RANK + other, mask=turned, other=0.0).to(tl.float32)
        turned1 = (first * cos - second * sin).to(dtype).to(tl.float32)
        turned2 = (second * cos + first * sin).to(dtype).to(tl.float32)
        x, turned1, turned2 = x / scale, turned1 / scale, turned2 / scale
        if LIMIT > 0:
            x, turned1, turned2 = saturated(x, LIMIT), saturated(turned1, LIMIT), saturated(turned2, LIMIT)
        stored = k_ptr.dtype.element_ty
        target = k_ptr + slot * DIM
        tl.store(target + d, x.to(stored), mask=d < RANK)
        tl.store(target + RANK + i, turned1.to(stored), mask=turned)
        tl.store(target + RANK + HALF + i, turned2.to(stored), mask=turned)
    else:
        head = (tl.program_id(1) - 1) * GROUP + tl.arange(0, GROUP)[:, None]
        inside = (head < HEADS) & turned[None, :]
        source = q_ptr + token * q_stride + head * (NOPE + 2 * HALF) + NOPE
        first = tl.load(source + one[None, :], mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + other[None, :], mask=inside, other=0.0).to(tl.float32)
        target = out_ptr + (token * HEADS + head) * DIM + RANK + i[None, :]
        tl.store(target, (first * cos[None, :] - second * sin[None, :]).to(dtype), mask=inside)
        tl.store(target + HALF, (second * cos[None, :] + first * sin[None, :]).to(dtype), mask=inside)


def append(pages: Pages, heads: LatentHeads, slots: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Queries [T, heads, D] of a layer, in `out` if given; normalized latents and rotated keys go to int32 slots[T] of
    its pages, divided by their scale and rounded to their dtype, FP8 saturating."""
    q = heads.absorb(out)
    tokens, count, width = heads.q.shape
    half, group = heads.rope_dim // 2, min(16, triton.next_power_of_2(count))
    limit = torch.finfo(pages.keys.dtype).max if pages.keys.dtype.itemsize == 1 else 0.0
    _append_latent_kernel[(tokens, 1 + triton.cdiv(count, group))](
        heads.q, heads.latent, heads.cos, heads.sin, heads.norm, slots, q, pages.keys, heads.eps, pages.scales[0],
        heads.q.stride(0), heads.latent.stride(0), count, width - heads.rope_dim, heads.rank, half,
        triton.next_power_of_2(heads.rank), triton.next_power_of_2(half), group, heads.interleaved, limit, num_warps=4,
    )  # fmt: skip
    return q
