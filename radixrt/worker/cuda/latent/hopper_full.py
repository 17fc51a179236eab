"""Latent attention by full heads on Hopper, with the interface of `full_heads`, by a warp-specialized kernel.

    producer, 1 warp          K (its parts without and with rotation) and V of a block, by the copy engine (TMA), ahead
                                                      |  full            ^  empty
    two consumer warpgroups   see `warpgroups`

K and V are in the workspace of `full_heads`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from radixrt.worker.cuda.attention import warpgroups
from radixrt.worker.cuda.attention.attend import Scratch
from radixrt.worker.cuda.attention.variants import Shape, Variant
from radixrt.worker.cuda.attention.warpgroups import (
    KEYS,
    ROWS,
    STAGES,
    attend_blocks,
    barriers,
    copy,
    count_blocks,
    store_results,
)
from radixrt.worker.cuda.attention.work import FIELDS, Tiling, make_items, sequence_tiles
from radixrt.worker.cuda.elementwise import launching
from radixrt.worker.cuda.latent import full_heads
from radixrt.worker.model.spec.spec import LatentSpec

MULTIPLY_REGISTERS, FEED_REGISTERS = 240, 24
NOPE, ROPE, VALUE = 128, 64, 128
"""The only head sizes that are supported: those of DeepSeek V2 and V3, and of Kimi K2."""


@gluon.jit
def _feed(
    items_ptr, starts_ptr, k_there, r_there, v_there, k_smem, r_smem, v_smem, k_full, k_empty, v_full, v_empty,
    NOPE: gl.constexpr, VALUE: gl.constexpr, RANK: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    ITEM: gl.constexpr,
):  # fmt: skip
    own = gl.program_id(0)
    first, last = warpgroups.numbers(starts_ptr)
    count = 0
    for number in range(first, last):
        item = items_ptr + number * ITEM
        origin, begin, end = gl.load(item + 2), gl.load(item + 3), gl.load(item + 4)
        blocks = count_blocks(begin, end, KEYS)
        at = origin + begin + (blocks - 1) * KEYS
        for _ in range(blocks):
            stage = count % STAGES
            phase = (count // STAGES) & 1
            k_bar, v_bar = k_full.index(stage), v_full.index(stage)
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_bar, k_there.block_type.nbytes + r_there.block_type.nbytes)
            copy(k_there, [at, own * NOPE], k_bar, k_smem.index(stage))
            copy(r_there, [at, RANK], k_bar, r_smem.index(stage))
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_bar, v_there.block_type.nbytes)
            copy(v_there, [at, own * VALUE], v_bar, v_smem.index(stage))
            at -= KEYS
            count += 1


@gluon.jit
def _place(ptr, place, stride, to, WIDTH: gl.constexpr, TYPE: gl.constexpr, L: gl.constexpr):
    """Copy rows of WIDTH elements into shared memory."""
    d = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L))
    to.store(gl.load(ptr + (place.to(gl.int64) * stride)[:, None] + d[None, :]).to(TYPE))


@gluon.jit
def _multiply(
    q_ptr, items_ptr, starts_ptr, out_ptr, partial_ptr, lse_ptr, q_smem, qr_smem, k_smem, r_smem, v_smem,
    k_full, k_empty, v_full, v_empty, turns, first_head, scale, v_scale, HALF: gl.constexpr,
    HEADS: gl.constexpr, NOPE: gl.constexpr, ROPE: gl.constexpr, VALUE: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, ITEM: gl.constexpr,
):  # fmt: skip
    """The consumer of rows 64 * HALF to 64 * HALF + 63 of every item of the program."""
    TYPE: gl.constexpr = k_smem.dtype
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    first, last = warpgroups.numbers(starts_ptr)
    head = first_head + gl.program_id(0)
    row = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    bars = k_full, k_empty, v_full, v_empty, turns
    count = 0
    turn = 0
    for number in range(first, last):
        item = items_ptr + number * ITEM
        query, queries, begin, end = gl.load(item), gl.load(item + 1), gl.load(item + 3), gl.load(item + 4)
        position, partial, direct = gl.load(item + 5), gl.load(item + 6), gl.load(item + 7)
        # Rows past the last query repeat that query, and are not stored.
        place = query + gl.minimum(row, queries - 1)
        q_at = q_ptr + head * (NOPE + ROPE)
        _place(q_at, place, HEADS * (NOPE + ROPE), q_smem, NOPE, TYPE, L)
        _place(q_at + NOPE, place, HEADS * (NOPE + ROPE), qr_smem, ROPE, TYPE, L)
        fence_async_shared()
        acc, total, peak, count, turn = attend_blocks(
            (q_smem, qr_smem), (k_smem, r_smem), v_smem, bars, begin, end, position, scale, count, turn, HALF, 1, True,
            True, VALUE, KEYS, STAGES,
        )  # fmt: skip
        store_results(
            query, queries, partial, direct, items_ptr, out_ptr + first_head * VALUE, partial_ptr + first_head * VALUE,
            lse_ptr + first_head, lse_ptr, acc, total, peak, v_scale, HALF, HEADS, HEADS, VALUE, False, False, 128,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["first_head"])
def _attend_full_specialised(
    q_ptr, k_there, r_there, v_there, items_ptr, starts_ptr, out_ptr, partial_ptr, lse_ptr, first_head, scale,
    v_scale, HEADS: gl.constexpr, RANK: gl.constexpr, NOPE: gl.constexpr, ROPE: gl.constexpr,
    VALUE: gl.constexpr, KEYS: gl.constexpr, ITEM: gl.constexpr, STAGES: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr, FEED_REGISTERS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    launching.wait(EARLY, NEXT=False)
    TYPE: gl.constexpr = k_there.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    k_smem = gl.allocate_shared_memory(TYPE, [STAGES, KEYS, NOPE], layout)
    r_smem = gl.allocate_shared_memory(TYPE, [STAGES, KEYS, ROPE], layout)
    v_smem = gl.allocate_shared_memory(TYPE, [STAGES, KEYS, VALUE], layout)
    q_smem = gl.allocate_shared_memory(TYPE, [2, 64, NOPE], layout)
    qr_smem = gl.allocate_shared_memory(TYPE, [2, 64, ROPE], layout)
    k_full, k_empty, v_full, v_empty, turns = barriers(STAGES)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                q_ptr, items_ptr, starts_ptr, out_ptr, partial_ptr, lse_ptr, q_smem.index(0),
                qr_smem.index(0), k_smem, r_smem, v_smem, k_full, k_empty, v_full, v_empty, turns, first_head,
                scale, v_scale, 0, HEADS, NOPE, ROPE, VALUE, KEYS, STAGES, ITEM,
            )),
            (_multiply, (
                q_ptr, items_ptr, starts_ptr, out_ptr, partial_ptr, lse_ptr, q_smem.index(1),
                qr_smem.index(1), k_smem, r_smem, v_smem, k_full, k_empty, v_full, v_empty, turns, first_head,
                scale, v_scale, 1, HEADS, NOPE, ROPE, VALUE, KEYS, STAGES, ITEM,
            )),
            (_feed, (
                items_ptr, starts_ptr, k_there, r_there, v_there, k_smem, r_smem, v_smem, k_full, k_empty, v_full,
                v_empty, NOPE, VALUE, RANK, KEYS, STAGES, ITEM,
            )),
        ],
        [4, 1],
        [MULTIPLY_REGISTERS, FEED_REGISTERS],
    )  # fmt: skip


# ---------------------------------------------------------------- where it is used


def described(k: torch.Tensor, v: torch.Tensor, latents: torch.Tensor) -> tuple[TensorDescriptor, ...]:
    """Descriptors of blocks of KEYS keys of one head: the part without rotation, the rotated part, values. See
    `full_heads.Keys`."""
    layout = gl.NVMMASharedLayout(128, 16)
    found = (k.flatten(1), k.shape[2]), (latents, ROPE), (v.flatten(1), v.shape[2])
    return tuple(TensorDescriptor(x, [*x.shape], [*x.stride()], [KEYS, width], layout) for x, width in found)


def launch(
    count: int, cache: launching.KernelCache | None, given: tuple[Any, ...], programs: int, variant: Variant
) -> Any:  # fmt: skip
    """Launch the kernel for `count` heads; see `full_heads.attend_full`."""
    return launching.launch(
        _attend_full_specialised, (count, programs, 1), cache, *given, variant.keys, FIELDS, variant.stages,
        MULTIPLY_REGISTERS, FEED_REGISTERS, num_warps=variant.warps,
    )  # fmt: skip


VARIANT = Variant(ROWS, KEYS, 4, STAGES, specialised=True)


def find(latent: LatentSpec, heads: int, dtype: torch.dtype, device: torch.device, other: Variant) -> Variant | None:
    """The variant of this kernel; None if it does not apply, or its results differ from those of the `other` one."""
    dims = latent.nope_dim, latent.rope_dim, latent.value_dim
    if dtype.itemsize != 2 or dims != (NOPE, ROPE, VALUE):
        return None
    return VARIANT if warpgroups.agrees(lambda: _apart(latent, heads, dtype, device, other), device) else None


def _apart(latent: LatentSpec, heads: int, dtype: torch.dtype, device: torch.device, other: Variant) -> float:
    """The relative difference between both kernels, for a few sequences and causal chunks."""
    starts, counts, origins = np.array([0, 130, 600]), np.array([300, 1, 170]), np.array([0, 384, 640])
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    first = np.cumsum(counts) - counts
    tokens, keys = int(counts.sum()), int(origins[-1]) + 896
    q, latents = draw(tokens, heads, NOPE + ROPE), draw(keys, latent.rank + ROPE)
    k, v = draw(keys, heads, NOPE), draw(keys, heads, VALUE)
    shape, found = Shape(heads, heads, VALUE, 1), []
    for variant in (VARIANT, other):
        single = not variant.specialised
        cut = Tiling(variant.rows, variant.keys, 1 << 20, 3, single=single)  # no tile is cut
        items, _ = make_items(sequence_tiles(origins, starts, counts, first, None, cut.queries), cut)
        items.items[:, 7] = 1
        work = torch.from_numpy(items.items).to(device), None if single else torch.from_numpy(items.starts).to(device)
        scratch, out = Scratch.make(1, shape, device), torch.zeros((tokens, heads, VALUE), dtype=dtype, device=device)
        placed = full_heads.Keys.of(k, v, latents, variant)
        full_heads.attend_full(q, placed, work, out, scratch, variant, 0, 0.1, (1.0, 1.0))
        found.append(out.float())
    return float((found[0] - found[1]).norm() / found[1].norm())
