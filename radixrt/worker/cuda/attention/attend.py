"""Attention over pages of any size and dtype, by the work lists of `work.make_items`: one kernel for decodes, chunks
and (with tiles of several sequences) shared prefixes, and one kernel that merges partial results.

Online softmax in base 2 (arXiv 1805.02867); partial results are merged by their log-sum-exp (arXiv 2311.01282).
A sink (see `AttentionSpec.sinks`) is added where a result becomes final: where it is written directly, or in the merge.
FP8 pages are widened to float16, which holds every FP8 value exactly, and multiplied by tensor cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.attention.variants import Shape, Variant, tiling
from radixrt.worker.cuda.attention.work import FIELDS, MERGE_FIELDS, Tiling
from radixrt.worker.cuda.elementwise.launching import LOG2_E, KernelCache, launch, wait
from radixrt.worker.cuda.latent import latent


def _attend_item(
    item, kv_head, q_ptr, k_ptr, v_ptr, table_ptr, order_ptr, out_ptr, partial_ptr, lse_ptr, sinks_ptr, stride, scale,
    v_scale, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, CAUSAL: tl.constexpr, ORDERED: tl.constexpr, SINKS: tl.constexpr,
    CAP: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, HALF_TYPE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = HEADS // KV_HEADS
    m = tl.arange(0, ROWS)
    n = tl.arange(0, KEYS)
    d = tl.arange(0, WIDTH)
    d_of_v = tl.arange(0, V_WIDTH)
    own = m // GROUP
    head = kv_head * GROUP + m % GROUP
    wide = d < DIM
    wide_of_v = d_of_v < V_DIM
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
    at_head = place.to(tl.int64) * HEADS + head
    q_at = at_head[:, None] * DIM + d[None, :]
    q = tl.load(q_ptr + q_at, mask=real[:, None] & wide[None, :], other=0.0)
    q = (q.to(tl.float32) * scale).to(HALF_TYPE)
    peak = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, V_WIDTH], tl.float32)
    for j in tl.range(begin, end, KEYS, num_stages=STAGES):
        key = j + n
        inside = key < end
        # Lanes past the end read the last key again: the keys beyond are another request's and may be NaN, and a weight
        # of 0 times NaN is NaN. Loads without a mask are also faster.
        known = tl.minimum(key, end - 1)
        if PAGE == 1:
            slot = tl.load(table_ptr + row * stride + known).to(tl.int64)
        else:
            slot = tl.load(table_ptr + row * stride + known // PAGE).to(tl.int64) * PAGE + known % PAGE
        at = ((slot * KV_HEADS + kv_head) * DIM)[:, None] + d[None, :]
        if WIDTH == DIM:
            k = tl.load(k_ptr + at).to(HALF_TYPE)
        else:
            k = tl.load(k_ptr + at, mask=wide[None, :], other=0.0).to(HALF_TYPE)
        s = tl.dot(q, tl.trans(k))
        if CAP > 0:  # CAP tanh(s / CAP), both in base 2
            s = CAP - 2 * CAP / (1 + tl.exp2(s * (2 * LOG2_E / CAP)))
        seen = inside[None, :]
        if CAUSAL:
            seen = seen & (key[None, :] <= (position + own)[:, None])
        if WINDOW > 0:
            if CHUNKED:
                seen = seen & (key[None, :] >= ((position + own) // WINDOW * WINDOW)[:, None])
            else:
                seen = seen & (key[None, :] > (position + own - WINDOW)[:, None])
        s = tl.where(seen, s, -1e30)
        higher = tl.maximum(peak, tl.max(s, 1))
        keep = tl.exp2(peak - higher)
        p = tl.exp2(s - higher[:, None])
        if CAUSAL or WINDOW > 0:  # a row that sees none of these keys
            p = tl.where(seen, p, 0.0)
        total = total * keep + tl.sum(p, 1)
        acc = acc * keep[:, None]
        peak = higher
        v_at = ((slot * KV_HEADS + kv_head) * V_DIM)[:, None] + d_of_v[None, :]
        if V_WIDTH == V_DIM:
            v = tl.load(v_ptr + v_at).to(HALF_TYPE)
        else:
            v = tl.load(v_ptr + v_at, mask=wide_of_v[None, :], other=0.0).to(HALF_TYPE)
        acc = tl.dot(p.to(HALF_TYPE), v, acc)
    if SINKS:  # partial results leave the sink out: the merge adds it
        sink = tl.load(sinks_ptr + head) * LOG2_E
        whole = total + tl.where(direct != 0, tl.exp2(sink - peak), 0.0)
    else:
        whole = total
    out = acc * (v_scale / tl.where(whole > 0, whole, 1.0))[:, None]
    stored = real[:, None] & wide_of_v[None, :]
    if direct != 0:
        out_at = at_head[:, None] * V_DIM + d_of_v[None, :]
        tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=stored)
    else:
        spot = (partial + own).to(tl.int64) * HEADS + head
        tl.store(partial_ptr + spot[:, None] * V_DIM + d_of_v[None, :], out, mask=stored)
        # NaN in the input is propagated: `total` is NaN then, and so is the result.
        lse = tl.where(total == 0, -1e30, peak + tl.log2(total))
        tl.store(lse_ptr + spot, lse, mask=real)


# In the loop over items it is called: inlined, it would spill registers. Without the loop a call would spill them.
_inlined_item = triton.jit(_attend_item)
_called_item = triton.jit(_attend_item, noinline=True)


@triton.jit(do_not_specialize=["stride"])  # otherwise it is compiled again for page tables of other widths
def _attend_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, items_ptr, starts_ptr, order_ptr, out_ptr, partial_ptr, lse_ptr, sinks_ptr,
    stride, scale, v_scale, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    V_DIM: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, CAUSAL: tl.constexpr, ORDERED: tl.constexpr,
    SINKS: tl.constexpr, CAP: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, ITEM: tl.constexpr, HALF_TYPE: tl.constexpr, STAGES: tl.constexpr,
    SINGLE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    # The heads of an item run at the same time: they read neighbouring bytes of the same slots.
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    if SINGLE:
        _inlined_item(
            items_ptr + program * ITEM, kv_head, q_ptr, k_ptr, v_ptr, table_ptr, order_ptr, out_ptr, partial_ptr,
            lse_ptr, sinks_ptr, stride, scale, v_scale, HEADS, KV_HEADS, DIM, V_DIM, PAGE, WINDOW, CHUNKED, CAUSAL,
            ORDERED, SINKS, CAP, QUERIES, ROWS, KEYS, WIDTH, V_WIDTH, HALF_TYPE, STAGES,
        )  # fmt: skip
    else:
        first, last = tl.load(starts_ptr + program), tl.load(starts_ptr + program + 1)
        for number in tl.range(first, last, num_stages=1):
            _called_item(
                items_ptr + number * ITEM, kv_head, q_ptr, k_ptr, v_ptr, table_ptr, order_ptr, out_ptr, partial_ptr,
                lse_ptr, sinks_ptr, stride, scale, v_scale, HEADS, KV_HEADS, DIM, V_DIM, PAGE, WINDOW, CHUNKED, CAUSAL,
                ORDERED, SINKS, CAP, QUERIES, ROWS, KEYS, WIDTH, V_WIDTH, HALF_TYPE, STAGES,
            )  # fmt: skip


@triton.jit
def _merge_kernel(
    merges_ptr, entries_ptr, partial_ptr, lse_ptr, more_ptr, more_lse_ptr, sinks_ptr, out_ptr, HEADS: tl.constexpr,
    DIM: tl.constexpr, MORE: tl.constexpr, SINKS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
    MERGE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    merge = merges_ptr + tl.program_id(0) * MERGE
    head = tl.program_id(1)
    query = tl.load(merge).to(tl.int64)
    entries = entries_ptr + tl.load(merge + 1)
    parts = tl.load(merge + 2)
    if parts == 0:
        return
    p = tl.arange(0, PARTS)
    d = tl.arange(0, WIDTH)
    peak = -1e30
    total = 0.0
    acc = tl.zeros([WIDTH], tl.float32)
    for begin in range(0, parts, PARTS):
        real = begin + p < parts
        entry = tl.load(entries + begin + p, mask=real, other=0)
        here = real
        if MORE > 0:
            here = real & (entry < MORE)
        spot = entry.to(tl.int64) * HEADS + head
        lse = tl.load(lse_ptr + spot, mask=here, other=-1e30)
        inside = here[:, None] & (d < DIM)[None, :]
        x = tl.load(partial_ptr + spot[:, None] * DIM + d[None, :], mask=inside, other=0.0).to(tl.float32)
        if MORE > 0:
            there = real & (entry >= MORE)
            spot = (entry - MORE).to(tl.int64) * HEADS + head
            lse = tl.where(there, tl.load(more_lse_ptr + spot, mask=there, other=-1e30), lse)
            inside = there[:, None] & (d < DIM)[None, :]
            more = tl.load(more_ptr + spot[:, None] * DIM + d[None, :], mask=inside, other=0.0).to(tl.float32)
            x = tl.where(there[:, None], more, x)
        higher = tl.maximum(peak, tl.max(lse, 0))
        keep = tl.exp2(peak - higher)
        weight = tl.where(real, tl.exp2(lse - higher), 0.0)
        acc = acc * keep + tl.sum(x * weight[:, None], 0)
        total = total * keep + tl.sum(weight, 0)
        peak = higher
    if SINKS:
        total += tl.exp2(tl.load(sinks_ptr + head) * LOG2_E - peak)
    at = (query * HEADS + head) * DIM + d
    tl.store(out_ptr + at, (acc / total).to(out_ptr.dtype.element_ty), mask=d < DIM)


MORE = 1 << 24
"""Entries of merges from this number on refer to a second tensor of partial results."""

Work = tuple[torch.Tensor, torch.Tensor | None]
"""`work.Items` on the device: int32[W, FIELDS] and, unless each item has a program of its own, int32[programs + 1]."""

Partials = tuple[torch.Tensor, torch.Tensor]
"""Partial results, float [P, heads, D], and their log-sum-exp in base 2, float32[P, heads]."""


@dataclass(slots=True)
class Scratch:
    """Partial results: float32 [partials, heads, width of V] and their log-sum-exp in base 2, [partials, heads]."""

    values: torch.Tensor
    lse: torch.Tensor

    @property
    def partials(self) -> Partials:
        return self.values, self.lse

    @classmethod
    def make(cls, partials: int, shape: Shape, device: torch.device) -> Scratch:
        values = torch.empty((partials, shape.heads, shape.value_dim), dtype=torch.float32, device=device)
        return cls(values, torch.empty((partials, shape.heads), dtype=torch.float32, device=device))


def half_type(dtype: torch.dtype) -> tl.dtype:
    """The dtype of the tensor cores' operands for pages of a dtype."""
    return {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}.get(dtype, tl.float16)


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    items: Work,
    out: torch.Tensor,
    scratch: Scratch,
    shape: Shape,
    variant: Variant,
    *,
    order: torch.Tensor | None = None,
    window: int | None = None,
    causal: bool = True,
    scales: tuple[float, float] = (1.0, 1.0),
    sinks: torch.Tensor | None = None,
    cache: KernelCache | None = None,
) -> Any:
    """Compute attention of q[T, heads, D] over the slots of keys [slots, kv_heads, D] and values [slots, kv_heads,
    width of V], into out[T, heads, width of V] or `scratch`. Latent attention reads only `keys`.

    `table` is the page table, int32[rows, pages]. With int32 `order`, queries of `items` are indices into it. `causal`:
    whether items may have keys after their first query, which have to be masked. K and V are multiplied by `scales`.
    `sinks` float32[heads] are added to results in `out`, not to those in `scratch`. Returns the compiled kernel; None
    without items or in the interpreter."""
    list, starts = items
    if not len(list):
        return None
    grid = shape.blocks, len(list) if starts is None else len(starts) - 1, 1
    listed = (
        table, list, list if starts is None else starts, list if order is None else order, out, scratch.values,
        scratch.lse,
    )  # fmt: skip
    numbers = table.stride(0), shape.scale * LOG2_E.value * scales[0], scales[1]
    if shape.latent is not None:
        assert not window and sinks is None and not shape.cap
        kinds = causal, order is not None, variant.queries(shape.group)
        sizes = shape.heads, shape.group, shape.head_dim, shape.latent, shape.page_size
        tile = variant.rows, variant.keys, variant.warps, variant.stages
        # A step's queries have this dtype already; those of benchmarks may not.
        of_latents = q.to(latent.multiplied(keys.dtype)), keys, *listed, *numbers
        return latent.launch(grid, cache, of_latents, sizes, kinds, tile, FIELDS, half_type(keys.dtype), starts is None)
    given = (
        q, keys, values, *listed, scratch.lse if sinks is None else sinks, *numbers,
        shape.heads, shape.kv_heads, shape.head_dim, shape.page_size,
    )  # fmt: skip
    kinds, queries = (causal, order is not None, sinks is not None), variant.queries(shape.group)
    if variant.specialised:
        from radixrt.worker.cuda.attention import hopper

        assert starts is not None and not window and not shape.cap
        return hopper.launch(grid, cache, given, (*kinds, queries), variant)
    widths = (triton.next_power_of_2(dim) for dim in (shape.head_dim, shape.value_dim))
    return launch(
        _attend_kernel, grid, cache, *given, shape.value_dim, window or 0, shape.chunked, *kinds,
        shape.cap * LOG2_E.value, queries, variant.rows, variant.keys, *widths, FIELDS, half_type(keys.dtype),
        variant.stages, starts is None, num_warps=variant.warps,
    )  # fmt: skip


SYSTEM_SHARED = 1024
"""Bytes of shared memory that the system reserves for each program, beside the program's own (CUDA C++ Programming
Guide, compute capabilities)."""
MAX_PROGRAMS = 32
"""The most programs that a multiprocessor runs at once (same source)."""


PROGRAMS = 12
"""Programs that are assumed to run at once where there is no GPU."""


def best_tiling(
    variant: Variant, shape: Shape, pages: torch.dtype, dtype: torch.dtype, device: torch.device, causal: bool
) -> Tiling:
    """The tiling for as many programs of a variant as the device runs at once, which follows from the registers and the
    shared memory of the compiled kernel. `causal`: for chunks. Their items have a program each (`Tiling.single`),
    unless the variant is specialised: then one program fills a multiprocessor."""
    if device.type != "cuda":
        return tiling(variant, shape, PROGRAMS, single=causal)
    if variant.specialised:
        return tiling(variant, shape, torch.cuda.get_device_properties(device).multi_processor_count)
    keys = torch.empty((1, shape.kv_heads, shape.head_dim), dtype=pages, device=device)
    values = keys[..., : shape.value_dim].contiguous()
    q = torch.empty((1, shape.heads, shape.head_dim), dtype=dtype, device=device)
    integers = torch.zeros((1, FIELDS), dtype=torch.int32, device=device)
    scratch, nothing = Scratch.make(1, shape, device), (integers, None if causal else integers[0, :2])
    sinks = torch.zeros(shape.heads, device=device) if shape.sinks else None
    compiled = attend(
        q, keys, values, integers, nothing, q, scratch, shape, variant, order=integers[0], causal=causal, sinks=sinks
    )
    chip = torch.cuda.get_device_properties(device)
    registers = variant.warps * 32 * (-(-compiled.n_regs // 8) * 8)
    shared = compiled.metadata.shared + SYSTEM_SHARED
    fit = min(chip.regs_per_multiprocessor // registers, chip.shared_memory_per_multiprocessor // shared)  # type: ignore[attr-defined]
    return tiling(variant, shape, chip.multi_processor_count * max(1, min(fit, MAX_PROGRAMS)), single=causal)


def merge(
    partials: Partials,
    merges: torch.Tensor,
    entries: torch.Tensor,
    out: torch.Tensor,
    shape: Shape,
    more: Partials | None = None,
    sinks: torch.Tensor | None = None,
    cache: KernelCache | None = None,
) -> None:
    """Merge partial results into out[T, heads, width of V], by int32 merges[M, MERGE_FIELDS] (those without parts are
    skipped) and int32 entries, of which those from MORE on refer to `more`. `sinks` float32[heads] are added."""
    if len(merges):
        second = more or partials
        launch(
            _merge_kernel, (len(merges), shape.heads, 1), cache,
            merges, entries, *partials, *second, partials[1] if sinks is None else sinks, out, shape.heads,
            shape.value_dim, MORE if more else 0, sinks is not None, 8, triton.next_power_of_2(shape.value_dim),
            MERGE_FIELDS, num_warps=1 if shape.latent is None else 4,
        )  # fmt: skip
