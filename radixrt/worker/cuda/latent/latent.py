"""Latent attention over pages, in the absorbed form: all heads share one KV head, and the first elements of its keys
are the values. A block of keys is loaded once, and multiplied twice.

Work lists, merges and pages are those of `attend`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.attention.pages import Pages
from radixrt.worker.cuda.elementwise import launching
from radixrt.worker.cuda.elementwise.kernels import saturated
from radixrt.worker.cuda.elementwise.launching import wait
from radixrt.worker.model.layers.latent import LatentHeads

# ---------------------------------------------------------------- attention


ASSEMBLED = tl.constexpr(not triton.knobs.runtime.interpret)
"""Whether inline assembly can be used; Triton's interpreter does not support it."""


@triton.jit
def _widened(x, HALF_TYPE: tl.constexpr):
    """Convert FP8 (E4M3) to HALF_TYPE, once for both products. The compiler would move a plain conversion behind the
    layout change of each product's operand: the second one would read FP8 byte by byte, and loads would not be
    pipelined. The assembly is declared impure, because pure assembly would be moved as well."""
    if ASSEMBLED and x.dtype == tl.float8e4nv and HALF_TYPE == tl.float16:
        return tl.inline_asm_elementwise(
            "{.reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b;}",
            "=r,=r,r", [x], dtype=tl.float16, is_pure=False, pack=4,
        )  # fmt: skip
    else:
        return x.to(HALF_TYPE)


@triton.jit
def _load(at, d, RANK: tl.constexpr, WHOLE: tl.constexpr, HALF_TYPE: tl.constexpr):
    """Load elements `d` of some keys; only the first RANK exist."""
    if WHOLE:
        return _widened(tl.load(at + d[None, :]), HALF_TYPE)
    else:
        return _widened(tl.load(at + d[None, :], mask=(d < RANK)[None, :], other=0.0), HALF_TYPE)


@triton.jit
def _attend_item(
    item, block, q_ptr, k_ptr, table_ptr, order_ptr, out_ptr, partial_ptr, lse_ptr, stride, scale, v_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, RANK: tl.constexpr, PAGE: tl.constexpr,
    CAUSAL: tl.constexpr, ORDERED: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PART: tl.constexpr, REST: tl.constexpr, HALF_TYPE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    WHOLE: tl.constexpr = 2 * PART == RANK
    m = tl.arange(0, ROWS)
    n = tl.arange(0, KEYS)
    d = tl.arange(0, PART)
    e = PART + d  # keys are loaded in two parts, to save registers while FP8 is converted
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
    # Queries are not scaled here: registers would hold a second copy of them.
    q_at = q_ptr + (at * DIM)[:, None]
    q = tl.load(q_at + d[None, :], mask=real[:, None] & (d < RANK)[None, :], other=0.0)
    q_more = tl.load(q_at + e[None, :], mask=real[:, None] & (e < RANK)[None, :], other=0.0)
    q_turned = tl.load(q_at + RANK + r[None, :], mask=real[:, None] & (r < DIM - RANK)[None, :], other=0.0)
    peak = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PART], tl.float32)
    more = tl.zeros([ROWS, PART], tl.float32)
    for j in tl.range(begin, end, KEYS, num_stages=STAGES):
        key = j + n
        # Lanes past the end read the last key again: the keys beyond are another request's and may be NaN.
        known = tl.minimum(key, end - 1)
        if PAGE == 1:
            slot = tl.load(table_ptr + row * stride + known).to(tl.int64)
        else:
            slot = tl.load(table_ptr + row * stride + known // PAGE).to(tl.int64) * PAGE + known % PAGE
        k_at = k_ptr + (slot * DIM)[:, None]
        k = _load(k_at, d, RANK, WHOLE, HALF_TYPE)
        s = tl.dot(q, tl.trans(k))
        k_more = _load(k_at, e, RANK, WHOLE, HALF_TYPE)
        s = tl.dot(q_more, tl.trans(k_more), s)
        k_turned = _load(k_at + RANK, r, DIM - RANK, REST == DIM - RANK, HALF_TYPE)
        s = tl.dot(q_turned, tl.trans(k_turned), s)
        seen = (key < end)[None, :]
        if CAUSAL:
            seen = seen & (key[None, :] <= (position + own)[:, None])
        s = tl.where(seen, s * scale, -1e30)
        higher = tl.maximum(peak, tl.max(s, 1))
        keep = tl.exp2(peak - higher)
        p = tl.exp2(s - higher[:, None])
        if CAUSAL:  # a row that sees none of these keys
            p = tl.where(seen, p, 0.0)
        total = total * keep + tl.sum(p, 1)
        peak = higher
        weights = p.to(HALF_TYPE)
        acc = tl.dot(weights, k, acc * keep[:, None])
        more = tl.dot(weights, k_more, more * keep[:, None])
    factor = (v_scale / tl.where(total > 0, total, 1.0))[:, None]
    if direct != 0:
        out_at = out_ptr + (at * RANK)[:, None]
        dtype = out_ptr.dtype.element_ty
        tl.store(out_at + d[None, :], (acc * factor).to(dtype), mask=real[:, None] & (d < RANK)[None, :])
        tl.store(out_at + e[None, :], (more * factor).to(dtype), mask=real[:, None] & (e < RANK)[None, :])
    else:
        spot = (partial + own).to(tl.int64) * HEADS + head
        partial_at = partial_ptr + (spot * RANK)[:, None]
        tl.store(partial_at + d[None, :], acc * factor, mask=real[:, None] & (d < RANK)[None, :])
        tl.store(partial_at + e[None, :], more * factor, mask=real[:, None] & (e < RANK)[None, :])
        # NaN in the input is propagated: `total` is NaN then, and so is the result.
        tl.store(lse_ptr + spot, tl.where(total == 0, -1e30, peak + tl.log2(total)), mask=real)


@triton.jit(do_not_specialize=["stride"])  # otherwise it is compiled again for page tables of other widths
def _attend_latent_kernel(
    q_ptr, k_ptr, table_ptr, items_ptr, starts_ptr, order_ptr, out_ptr, partial_ptr, lse_ptr, stride, scale, v_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, RANK: tl.constexpr, PAGE: tl.constexpr,
    CAUSAL: tl.constexpr, ORDERED: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PART: tl.constexpr, REST: tl.constexpr, ITEM: tl.constexpr, HALF_TYPE: tl.constexpr, STAGES: tl.constexpr,
    SINGLE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    # The heads of an item run at the same time: they read the same keys.
    block = tl.program_id(0)
    program = tl.program_id(1)
    if SINGLE:
        _attend_item(
            items_ptr + program * ITEM, block, q_ptr, k_ptr, table_ptr, order_ptr, out_ptr, partial_ptr, lse_ptr,
            stride, scale, v_scale, HEADS, GROUP, DIM, RANK, PAGE, CAUSAL, ORDERED, QUERIES, ROWS, KEYS, PART, REST,
            HALF_TYPE, STAGES,
        )  # fmt: skip
    else:
        first, last = tl.load(starts_ptr + program), tl.load(starts_ptr + program + 1)
        for number in tl.range(first, last, num_stages=1):
            _attend_item(
                items_ptr + number * ITEM, block, q_ptr, k_ptr, table_ptr, order_ptr, out_ptr, partial_ptr, lse_ptr,
                stride, scale, v_scale, HEADS, GROUP, DIM, RANK, PAGE, CAUSAL, ORDERED, QUERIES, ROWS, KEYS, PART,
                REST, HALF_TYPE, STAGES,
            )  # fmt: skip


def launch(
    grid: tuple[int, int, int], cache: launching.KernelCache | None, given: tuple[Any, ...], sizes: tuple[int, ...],
    kinds: tuple[bool, bool, int], tile: tuple[int, int, int, int], fields: int, half: Any, single: bool,
) -> Any:  # fmt: skip
    """See `attend.attend`. `given`: tensors and numbers; `sizes`: heads, heads of a tile, widths of K and V, page size;
    `kinds`: whether items are masked, whether they have an order, queries of a tile; `tile`: rows, keys, warps,
    stages."""
    rows, keys, warps, stages = tile
    _, _, dim, rank, _ = sizes
    part, rest = (max(16, triton.next_power_of_2(n)) for n in (-(-rank // 2), dim - rank))
    return launching.launch(
        _attend_latent_kernel, grid, cache, *given, *sizes, *kinds, rows, keys, part, rest, fields, half, stages,
        single, num_warps=warps,
    )  # fmt: skip


def multiplied(pages: torch.dtype) -> torch.dtype:
    """The dtype of queries for pages of a dtype, in which they are multiplied (see `attend.half_type`)."""
    return pages if pages.itemsize > 1 else torch.float16


# ---------------------------------------------------------------- norm of latents, rotation, pages


@triton.jit
def _narrowed(x, out_ptr):
    """Convert to the dtype of `out_ptr`; float16 saturates."""
    return saturated(x.to(tl.float32), 65504.0).to(out_ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["count"])
def _append_latent_kernel(
    q_ptr, absorbed_ptr, latent_ptr, cos_ptr, sin_ptr, norm_ptr, slots_ptr, out_ptr, full_ptr, k_ptr, eps, scale,
    q_stride, latent_stride, count, HEADS: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr,
    WIDTH: tl.constexpr, TURNED: tl.constexpr, GROUP: tl.constexpr, INTERLEAVED: tl.constexpr, LIMIT: tl.constexpr,
    ANOTHER: tl.constexpr, PLAIN: tl.constexpr, FULL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
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
        k1 = tl.load(source + RANK + one, mask=turned, other=0.0).to(tl.float32)
        k2 = tl.load(source + RANK + other, mask=turned, other=0.0).to(tl.float32)
        turned1 = (k1 * cos - k2 * sin).to(dtype).to(tl.float32)
        turned2 = (k2 * cos + k1 * sin).to(dtype).to(tl.float32)
        x, turned1, turned2 = x / scale, turned1 / scale, turned2 / scale
        if LIMIT > 0:
            x, turned1, turned2 = saturated(x, LIMIT), saturated(turned1, LIMIT), saturated(turned2, LIMIT)
        stored = k_ptr.dtype.element_ty
        k_at = k_ptr + slot * DIM
        tl.store(k_at + d, x.to(stored), mask=d < RANK)
        tl.store(k_at + RANK + i, turned1.to(stored), mask=turned)
        tl.store(k_at + RANK + HALF + i, turned2.to(stored), mask=turned)
    else:
        head = (tl.program_id(1) - 1) * GROUP + tl.arange(0, GROUP)[:, None]
        inside = (head < HEADS) & turned[None, :]
        q_at = q_ptr + token * q_stride + head * (NOPE + 2 * HALF) + NOPE
        q1 = tl.load(q_at + one[None, :], mask=inside, other=0.0).to(tl.float32)
        q2 = tl.load(q_at + other[None, :], mask=inside, other=0.0).to(tl.float32)
        to = out_ptr + (token * HEADS + head) * DIM
        first = (q1 * cos[None, :] - q2 * sin[None, :]).to(dtype)
        second = (q2 * cos[None, :] + q1 * sin[None, :]).to(dtype)
        if FULL:
            full_at = full_ptr + (token * HEADS + head) * (NOPE + 2 * HALF)
            tl.store(full_at + NOPE + i[None, :], first, mask=inside)
            tl.store(full_at + NOPE + HALF + i[None, :], second, mask=inside)
            j = tl.arange(0, PLAIN)[None, :]
            all = (head < HEADS) & (j < NOPE)
            tl.store(full_at + j, tl.load(q_at - NOPE + j, mask=all, other=0.0), mask=all)
            inside = (head < tl.where(token < count, HEADS, 0)) & turned[None, :]
        if ANOTHER:
            j = tl.arange(0, WIDTH)[None, :]
            all = (head < tl.where(token < count, HEADS, 0)) & (j < RANK)
            absorbed = tl.load(absorbed_ptr + (token * HEADS + head) * RANK + j, mask=all, other=0.0)
            tl.store(to + j, _narrowed(absorbed, out_ptr), mask=all)
            tl.store(to + RANK + i[None, :], _narrowed(first, out_ptr), mask=inside)
            tl.store(to + RANK + HALF + i[None, :], _narrowed(second, out_ptr), mask=inside)
        else:
            tl.store(to + RANK + i[None, :], first, mask=inside)
            tl.store(to + RANK + HALF + i[None, :], second, mask=inside)


def append(
    pages: Pages, heads: LatentHeads, slots: torch.Tensor, out: torch.Tensor | None = None,
    full: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Write a layer's normalized latents and rotated keys to int32 slots[T] of its pages, divided by their scale and
    rounded to their dtype, FP8 saturating. Returns the absorbed queries [T, heads, D] in the dtype of `multiplied`, in
    `out` if given (which may be shorter, for the first tokens only). If `full` is given, the queries of full heads are
    written to full[T, heads, nope + rope]."""
    tokens, count, width = heads.q.shape
    dtype = multiplied(pages.keys.dtype)
    another = dtype != heads.q.dtype
    q = heads.q.new_empty((tokens, count, heads.latent.shape[1]), dtype=dtype) if out is None else out
    plain = heads.q[: len(q), :, : -heads.rope_dim]
    absorbed = q
    if another:
        absorbed = heads.ups.k(plain)
    else:
        heads.ups.k.put(plain, q[..., : heads.rank])
    half, group = heads.rope_dim // 2, min(16, triton.next_power_of_2(count))
    limit = torch.finfo(pages.keys.dtype).max if pages.keys.dtype.itemsize == 1 else 0.0
    launching.launch(
        _append_latent_kernel, (tokens, 1 + triton.cdiv(count, group)), None,
        heads.q, absorbed, heads.latent, heads.cos, heads.sin, heads.norm, slots, q, q if full is None else full,
        pages.keys, heads.eps, pages.scales[0], heads.q.stride(0), heads.latent.stride(0), len(q), count,
        width - heads.rope_dim, heads.rank, half, triton.next_power_of_2(heads.rank), triton.next_power_of_2(half),
        group, heads.interleaved, limit, another, triton.next_power_of_2(width - heads.rope_dim), full is not None,
        num_warps=4,
    )  # fmt: skip
    return q
