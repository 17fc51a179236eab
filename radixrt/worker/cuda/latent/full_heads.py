"""Latent attention of long chunks by full heads: the keys and values of each head are first computed from the latents.

    pages, FP8 or not --gather--> latents [S, rank + rope] --two products--> K [S, heads, nope], V [S, heads, width]
                                          rotated keys, of all heads ---------------+--> attention --> out

A pair of a query and a key then takes nope + rope + width multiplications per head instead of 2 rank + rope
(DeepSeek-V2: 320 instead of 1,088), but each key takes rank * (nope + width) more: with few queries per key, pages are
read in place (`latent`). Latents are read back from the pages also when they are new. Each sequence's keys begin at a
multiple of ALIGN, and zeros follow them, so that a block of keys holds nothing of another sequence. `full_chunks` has
the workspace, and `chunk_plan` decides which chunks are computed this way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.attention import attend
from radixrt.worker.cuda.attention.attend import Scratch, half_type
from radixrt.worker.cuda.attention.pages import Pages
from radixrt.worker.cuda.attention.variants import Shape, Variant
from radixrt.worker.cuda.attention.work import FIELDS, Tiling, make_items, sequence_tiles
from radixrt.worker.cuda.elementwise.launching import LOG2_E, KernelCache, launch, wait
from radixrt.worker.model.spec.spec import LatentSpec

ALIGN = 128
"""In keys; a multiple of the block size of every variant."""


def chunk_variant(room: int) -> Variant:
    """The variant of the portable kernel, by the bytes of shared memory that a program may have."""
    return Variant(128, 64, 8, 3) if room > 200_000 else Variant(64, 64, 4, 2)


def find_specialised(
    latent: LatentSpec, heads: int, dtype: torch.dtype, device: torch.device, other: Variant
) -> Variant | None:
    """The variant of `hopper_full`; None if it cannot be used, or its results differ from those of the `other` one."""
    try:
        from radixrt.worker.cuda.attention import warpgroups
        from radixrt.worker.cuda.latent import hopper_full
    except (ImportError, AttributeError):  # a Triton without Gluon, or with another version of it
        return None
    both = hopper_full.VARIANT, other
    if not hopper_full.applies(latent, dtype):
        return None
    return both[0] if warpgroups.agrees(lambda: _apart(both, latent, heads, dtype, device), device) else None


def _apart(
    variants: tuple[Variant, Variant], latent: LatentSpec, heads: int, dtype: torch.dtype, device: torch.device
) -> float:
    """The relative difference between both kernels, for a few sequences and causal chunks."""
    nope, rope, width = latent.nope_dim, latent.rope_dim, latent.value_dim
    starts, counts, origins = np.array([0, 130, 600]), np.array([300, 1, 170]), np.array([0, 384, 640])
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    first = np.cumsum(counts) - counts
    tokens, keys = int(counts.sum()), int(origins[-1]) + 896
    q, latents = draw(tokens, heads, nope + rope), draw(keys, latent.rank + rope)
    k, v = draw(keys, heads, nope), draw(keys, heads, width)
    shape, results = Shape(heads, heads, width, 1), []
    for variant in variants:
        single = not variant.specialised
        cut = Tiling(variant.rows, variant.keys, 1 << 20, 3, single=single)  # no tile is cut
        items, _ = make_items(sequence_tiles(origins, starts, counts, first, None, cut.queries), cut)
        items.items[:, 7] = 1
        work = torch.from_numpy(items.items).to(device), None if single else torch.from_numpy(items.starts).to(device)
        scratch, out = Scratch.make(1, shape, device), torch.zeros((tokens, heads, width), dtype=dtype, device=device)
        placed = Keys.of(k, v, latents, variant)
        attend_full(q, placed, work, out, scratch, variant, 0, 0.1, (1.0, 1.0))
        results.append(out.float())
    return float((results[0] - results[1]).norm() / results[1].norm())


# ---------------------------------------------------------------- latents, side by side


@triton.jit(do_not_specialize=["stride"])
def _gather_latents_kernel(
    k_ptr, table_ptr, sequences_ptr, out_ptr, stride, DIM: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    PAGE: tl.constexpr, ALIGN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    sequence = sequences_ptr + tl.program_id(1) * 3
    row = tl.load(sequence).to(tl.int64)
    count = tl.load(sequence + 1)
    begin = tl.load(sequence + 2).to(tl.int64)
    j = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    room = (count + ALIGN - 1) // ALIGN * ALIGN
    if tl.program_id(0) * TOKENS < room:
        known = j < count
        slot = tl.load(table_ptr + row * stride + j // PAGE, mask=known, other=0).to(tl.int64) * PAGE + j % PAGE
        i = tl.arange(0, BLOCK)
        inside = (i < DIM)[None, :]
        x = tl.load(k_ptr + slot[:, None] * DIM + i[None, :], mask=known[:, None] & inside, other=0.0).to(tl.float32)
        at = out_ptr + (begin + j)[:, None] * DIM + i[None, :]
        tl.store(at, x.to(out_ptr.dtype.element_ty), mask=(j < room)[:, None] & inside)


def gather(
    pages: Pages, page_size: int, sequences: torch.Tensor, longest: int, out: torch.Tensor,
    cache: KernelCache | None = None,
) -> None:  # fmt: skip
    """Copy the latents of sequences, without their scale, to `out` [S, D], followed by zeros up to a multiple of ALIGN.

    `sequences` is int32[B, 3]: row of the page table, number of keys (at most `longest`), first row in `out`."""
    dim = out.shape[1]
    block = triton.next_power_of_2(dim)
    tokens = max(1, min(16, 8192 // block))
    grid = triton.cdiv(triton.cdiv(longest, ALIGN) * ALIGN, tokens), len(sequences), 1
    launch(
        _gather_latents_kernel, grid, cache, pages.keys, pages.table, sequences, out, pages.table.stride(0), dim, block,
        tokens, page_size, ALIGN, num_warps=8,
    )  # fmt: skip


# ---------------------------------------------------------------- attention


@triton.jit
def _columns(ptr, d, COUNT: tl.constexpr, WHOLE: tl.constexpr, HALF_TYPE: tl.constexpr):
    """Load elements `d` of some rows, of which the first COUNT exist."""
    if WHOLE:
        return tl.load(ptr + d[None, :]).to(HALF_TYPE)
    else:
        return tl.load(ptr + d[None, :], mask=(d < COUNT)[None, :], other=0.0).to(HALF_TYPE)


@triton.jit
def _over_keys(
    q, q_turned, acc, total, peak, seen, begin, end, k_ptr, r_ptr, v_ptr, k_stride, v_stride, scale,
    DIM: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, MASKED: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, VALUES: tl.constexpr, HALF_TYPE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Attention over the keys [begin, end). With MASKED, a row sees keys up to `seen`."""
    n = tl.arange(0, KEYS)
    d = tl.arange(0, WIDTH)
    r = tl.arange(0, REST)
    e = tl.arange(0, VALUES)
    for j in tl.range(begin, end, KEYS, num_stages=STAGES):
        at = (j + n).to(tl.int64)[:, None]
        k = _columns(k_ptr + at * k_stride, d, NOPE, WIDTH == NOPE, HALF_TYPE)
        s = tl.dot(q, tl.trans(k))
        k_turned = _columns(r_ptr + at * DIM, r, ROPE, REST == ROPE, HALF_TYPE)
        s = tl.dot(q_turned, tl.trans(k_turned), s)
        if MASKED:
            s = tl.where((j + n)[None, :] <= seen[:, None], s * scale, -1e30)
        else:
            s = s * scale
        # Above the masked scores: a row that sees none of these keys gets weights of 0.
        higher = tl.maximum(peak, tl.max(s, 1))
        keep = tl.exp2(peak - higher)
        p = tl.exp2(s - higher[:, None])
        total = total * keep + tl.sum(p, 1)
        peak = higher
        v = _columns(v_ptr + at * v_stride, e, VALUE, VALUES == VALUE, HALF_TYPE)
        acc = tl.dot(p.to(HALF_TYPE), v, acc * keep[:, None])
    return acc, total, peak


@triton.jit(do_not_specialize=["first"])
def _attend_full_kernel(
    q_ptr, k_ptr, latent_ptr, v_ptr, items_ptr, out_ptr, partial_ptr, lse_ptr, first, k_stride, v_stride, scale,
    v_scale, HEADS: tl.constexpr, DIM: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, VALUES: tl.constexpr,
    ITEM: tl.constexpr, HALF_TYPE: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    own = tl.program_id(0)
    head = first + own
    item = items_ptr + tl.program_id(1) * ITEM
    m = tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    r = tl.arange(0, REST)
    e = tl.arange(0, VALUES)
    query = tl.load(item)
    queries = tl.load(item + 1)
    origin = tl.load(item + 2).to(tl.int64)
    begin = tl.load(item + 3)
    end = tl.load(item + 4)
    position = tl.load(item + 5)
    partial = tl.load(item + 6)
    direct = tl.load(item + 7)
    real = m < queries
    place = (query + tl.minimum(m, queries - 1)).to(tl.int64)
    q_at = (q_ptr + (place * HEADS + head) * (NOPE + ROPE))[:, None]
    q = _columns(q_at, d, NOPE, WIDTH == NOPE, HALF_TYPE)
    q_turned = _columns(q_at + NOPE, r, ROPE, REST == ROPE, HALF_TYPE)
    k_ptr += origin * k_stride + own * NOPE
    v_ptr += origin * v_stride + own * VALUE
    r_ptr = latent_ptr + origin * DIM + (DIM - ROPE)
    acc = tl.zeros([ROWS, VALUES], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], -1e20, tl.float32)
    seen = tl.minimum(position + m, end - 1)
    plain = begin + tl.maximum(tl.minimum(position + 1, end) - begin, 0) // KEYS * KEYS  # all rows see keys before it
    acc, total, peak = _over_keys(
        q, q_turned, acc, total, peak, seen, begin, plain, k_ptr, r_ptr, v_ptr, k_stride, v_stride, scale, DIM, NOPE,
        ROPE, VALUE, False, KEYS, WIDTH, REST, VALUES, HALF_TYPE, STAGES,
    )  # fmt: skip
    acc, total, peak = _over_keys(
        q, q_turned, acc, total, peak, seen, plain, end, k_ptr, r_ptr, v_ptr, k_stride, v_stride, scale, DIM, NOPE,
        ROPE, VALUE, True, KEYS, WIDTH, REST, VALUES, HALF_TYPE, STAGES,
    )  # fmt: skip
    out = acc * (v_scale / tl.where(total > 0, total, 1.0))[:, None]
    stored = real[:, None] & (e < VALUE)[None, :]
    if direct != 0:
        at = (place * HEADS + head)[:, None] * VALUE + e[None, :]
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=stored)
    else:
        spot = (partial + m).to(tl.int64) * HEADS + head
        tl.store(partial_ptr + spot[:, None] * VALUE + e[None, :], out, mask=stored)
        # NaN in the input is propagated: `total` is NaN then, and so is the result.
        tl.store(lse_ptr + spot, tl.where(total == 0, -1e30, peak + tl.log2(total)), mask=real)


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys and values of n heads for S tokens, and the latents that they were computed from."""

    k: torch.Tensor
    """[S, n, nope]."""
    v: torch.Tensor
    """[S, n, width]."""
    latents: torch.Tensor
    """[S, D]: the last elements are the rotated parts of keys, which all heads share."""
    described: tuple[Any, ...] = ()
    """Descriptors of all three for the copy engine (TMA)."""

    @classmethod
    def of(cls, k: torch.Tensor, v: torch.Tensor, latents: torch.Tensor, variant: Variant) -> Keys:
        """With descriptors if the kernel of `variant` needs them."""
        if not variant.specialised:
            return cls(k, v, latents)
        from radixrt.worker.cuda.latent import hopper_full

        return cls(k, v, latents, hopper_full.described(k, v, latents))


def attend_full(
    q: torch.Tensor, keys: Keys, items: attend.Work, out: torch.Tensor, scratch: Scratch, variant: Variant, first: int,
    scale: float, scales: tuple[float, float], cache: KernelCache | None = None,
) -> Any:  # fmt: skip
    """Write the attention of q[T, heads, nope + rope] to out[T, heads, width] or `scratch`, for the heads from `first`
    on, whose `keys` are given. `items` are work.Items that have, instead of the row of the page table, the place of the
    sequence's first key in `keys`. K and V are multiplied by `scales`. Returns the compiled kernel."""
    list, starts = items
    if not len(list):
        return None
    k, v, latents = keys.k, keys.v, keys.latents
    count, nope, width = k.shape[1], k.shape[2], v.shape[2]
    rope = q.shape[2] - nope
    results = out, *scratch.partials
    numbers = scale * LOG2_E.value * scales[0], scales[1]
    if variant.specialised:
        from radixrt.worker.cuda.latent import hopper_full

        assert starts is not None
        sizes = q.shape[1], latents.shape[1] - rope, nope, rope, width
        return hopper_full.launch(
            count,
            cache,
            (q, *keys.described, list, starts, *results, first, *numbers, *sizes),
            len(starts) - 1,
            variant,
        )
    widths = (max(16, triton.next_power_of_2(n)) for n in (nope, rope, width))
    return launch(
        _attend_full_kernel, (count, len(list), 1), cache, q, k, latents, v, list, *results, first, k.stride(0),
        v.stride(0), *numbers, q.shape[1], latents.shape[1], nope, rope, width, variant.rows, variant.keys, *widths,
        FIELDS, half_type(k.dtype), variant.stages, num_warps=variant.warps,
    )  # fmt: skip
