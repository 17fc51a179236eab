"""Latent attention by full heads on Hopper, with the interface of `full_heads`, by a warp-specialized kernel.

    producer, 1 warp          K (its parts without and with rotation) and V of a block, by the copy engine (TMA), ahead
                                                      |  full            ^  empty
    two consumer warpgroups   see `warpgroups`

K and V are in the workspace of `full_heads`.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from radixrt.worker.cuda.attention import warpgroups
from radixrt.worker.cuda.attention.variants import Variant
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
from radixrt.worker.cuda.attention.work import FIELDS
from radixrt.worker.cuda.elementwise import launching
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


def applies(latent: LatentSpec, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for these heads."""
    return dtype.itemsize == 2 and (latent.nope_dim, latent.rope_dim, latent.value_dim) == (NOPE, ROPE, VALUE)
