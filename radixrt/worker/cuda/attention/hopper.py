"""Attention of many queries over FP8 pages on Hopper, with the interface of `attend`, by a warp-specialized kernel.

    producer, 8 warps         K, V of a block: slots -> FP8 in registers -> float16 in shared memory, a block ahead
                                                      |  full            ^  empty
    two consumer warpgroups   see `warpgroups`

A multiprocessor runs one program, whose two consumers, of 64 rows each, use the same keys and values.

Registers are tight: a producer that spills in its loop halves the speed.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from radixrt.worker.cuda.attention import warpgroups
from radixrt.worker.cuda.attention.variants import Shape, Variant
from radixrt.worker.cuda.attention.warpgroups import (
    KEYS,
    ROWS,
    STAGES,
    attend_blocks,
    barriers,
    count_blocks,
    store_results,
)
from radixrt.worker.cuda.attention.work import FIELDS
from radixrt.worker.cuda.elementwise import launching

FEEDERS = 8
MULTIPLY_REGISTERS, FEED_REGISTERS = 192, 64
DIMS = (64, 128)


# ---------------------------------------------------------------- the feeder

OPEN = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
"""Whether the method has its public name, as in Triton 3.9 and newer; before, the name began with an underscore."""


@gluon.jit
def _entered(items_ptr, table_ptr, number, stride, KEYS: gl.constexpr, ITEM: gl.constexpr):
    """Returns an item's row of the page table, its first key, the end of its keys, and the first key of its last
    block."""
    item = items_ptr + number * ITEM
    row_ptr = table_ptr + gl.load(item + 2).to(gl.int64) * stride
    begin = gl.load(item + 3)
    end = gl.load(item + 4)
    return row_ptr, begin, end, begin + (count_blocks(begin, end, KEYS) - 1) * KEYS


@gluon.jit
def _slots(row_ptr, key, end, PAGE: gl.constexpr, KEYS: gl.constexpr, L: gl.constexpr, CUT: gl.constexpr):
    """The slots of KEYS keys from `key` on. Past the end, that of the last key again: the keys there are another
    request's and may be NaN, and a weight of 0 times NaN is NaN."""
    n = gl.arange(0, KEYS, layout=gl.SliceLayout(1, L))
    if CUT:
        n = gl.maximum(gl.minimum(n, end - 1 - key), 0)
    if PAGE == 1:
        return gl.load(row_ptr + key + n)
    else:
        return gl.load(row_ptr + (key + n) // PAGE) * PAGE + (key + n) % PAGE


@gluon.jit
def _next_slots(
    items_ptr, table_ptr, number, last, row_ptr, begin, end, key, stride, PAGE: gl.constexpr, KEYS: gl.constexpr,
    L: gl.constexpr, ITEM: gl.constexpr,
):  # fmt: skip
    """Advance the producer by one block: in the same item, or to the next one, if there is one before `last`."""
    if key > begin:
        key -= KEYS
        slot = _slots(row_ptr, key, end, PAGE, KEYS, L, False)
    else:
        number = gl.minimum(number + 1, last - 1)
        row_ptr, begin, end, key = _entered(items_ptr, table_ptr, number, stride, KEYS, ITEM)
        slot = _slots(row_ptr, key, end, PAGE, KEYS, L, True)
    return number, row_ptr, begin, end, key, slot


@gluon.jit
def _rows(ptr, slot, ROW: gl.constexpr, WORDS: gl.constexpr, L: gl.constexpr):
    d = gl.arange(0, WORDS, layout=gl.SliceLayout(0, L))
    return ptr + (slot.to(gl.int64) * ROW)[:, None] + d[None, :]


@gluon.jit
def _widened(x, KEYS: gl.constexpr, WORDS: gl.constexpr, E5M2: gl.constexpr):
    """Convert int32[KEYS, WORDS] of 4 FP8 values each to int32[KEYS, 2 WORDS] of 2 float16 values each, exactly."""
    if E5M2:
        low, high = gl.inline_asm_elementwise(
            "{.reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e5m2x2 $0, a; cvt.rn.f16x2.e5m2x2 $1, b;}",
            "=r,=r,r", [x], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low, high = gl.inline_asm_elementwise(
            "{.reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b;}",
            "=r,=r,r", [x], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    return gl.join(low, high).reshape([KEYS, 2 * WORDS])


@gluon.jit
def _feed(
    items_ptr, starts_ptr, table_ptr, k_ptr, v_ptr, k_smem, v_smem, k_full, k_empty, v_full, v_empty, stride,
    KV_HEADS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    FEEDERS: gl.constexpr, ITEM: gl.constexpr,
):  # fmt: skip
    # In words of 4 FP8 values: otherwise each byte that is loaded ahead would take a register.
    WORDS: gl.constexpr = DIM // 4
    ROW: gl.constexpr = KV_HEADS * WORDS
    E5M2: gl.constexpr = v_ptr.dtype.element_ty == gl.float8e5
    HALVES: gl.constexpr = gl.NVMMASharedLayout(128, 32)
    # 16 bytes per thread, 4 threads per row. So the 8 neighbouring threads whose 16-byte stores are issued together,
    # even pieces of one row and odd ones of the next (swizzled), have no bank conflicts.
    L: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [FEEDERS, 1], [1, 0])
    if OPEN:
        k_smem = k_smem.reinterpret(gl.int32, [STAGES, KEYS, DIM // 2], HALVES)
        v_smem = v_smem.reinterpret(gl.int32, [STAGES, KEYS, DIM // 2], HALVES)
    else:
        k_smem = k_smem._reinterpret(gl.int32, [STAGES, KEYS, DIM // 2], HALVES)
        v_smem = v_smem._reinterpret(gl.int32, [STAGES, KEYS, DIM // 2], HALVES)
    k_ptr = k_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + gl.program_id(0) * WORDS
    v_ptr = v_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + gl.program_id(0) * WORDS
    first, last = warpgroups.numbers(starts_ptr)
    if first < last:
        count = 0
        # Loads run one block ahead of stores, and look-ups of slots another one, also across items.
        ahead = first
        row_ptr, begin, end, key = _entered(items_ptr, table_ptr, ahead, stride, KEYS, ITEM)
        slot = _slots(row_ptr, key, end, PAGE, KEYS, L, True)
        k = gl.load(_rows(k_ptr, slot, ROW, WORDS, L))
        v = gl.load(_rows(v_ptr, slot, ROW, WORDS, L))
        ahead, row_ptr, begin, end, key, slot = _next_slots(
            items_ptr, table_ptr, ahead, last, row_ptr, begin, end, key, stride, PAGE, KEYS, L, ITEM
        )
        for number in range(first, last):
            item = items_ptr + number * ITEM
            for _ in range(count_blocks(gl.load(item + 3), gl.load(item + 4), KEYS)):
                stage = count % STAGES
                phase = (count // STAGES) & 1
                mbarrier.wait(k_empty.index(stage), phase ^ 1)
                k_smem.index(stage).store(_widened(k, KEYS, WORDS, E5M2))
                fence_async_shared()
                mbarrier.arrive(k_full.index(stage))
                k = gl.load(_rows(k_ptr, slot, ROW, WORDS, L))
                mbarrier.wait(v_empty.index(stage), phase ^ 1)
                v_smem.index(stage).store(_widened(v, KEYS, WORDS, E5M2))
                fence_async_shared()
                mbarrier.arrive(v_full.index(stage))
                v = gl.load(_rows(v_ptr, slot, ROW, WORDS, L))
                ahead, row_ptr, begin, end, key, slot = _next_slots(
                    items_ptr, table_ptr, ahead, last, row_ptr, begin, end, key, stride, PAGE, KEYS, L, ITEM
                )
                count += 1


# ---------------------------------------------------------------- the warpgroups


@gluon.jit
def _place_queries(
    query, queries, q_ptr, order_ptr, q_smem, scale, HALF: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr,
    DIM: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Write this warpgroup's rows of an item's queries, times `scale`, to shared memory."""
    GROUP: gl.constexpr = HEADS // KV_HEADS
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // DIM, DIM // 8], [4, 1], [1, 0])
    m = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    d = gl.arange(0, DIM, layout=gl.SliceLayout(0, L))
    # Rows past the last query repeat that query, and are not stored: loads without a mask overlap better.
    place = query + gl.minimum(m // GROUP, queries - 1)
    if ORDERED:
        place = gl.load(order_ptr + place)
    at = (place.to(gl.int64) * HEADS + gl.program_id(0) * GROUP + m % GROUP)[:, None] * DIM + d[None, :]
    q = gl.load(q_ptr + at).to(gl.float32) * scale
    q_smem.store(q.to(gl.float16))
    fence_async_shared()


@gluon.jit
def _multiply(
    q_ptr, items_ptr, starts_ptr, order_ptr, out_ptr, partial_ptr, lse_ptr, sinks_ptr, q_smem, k_smem, v_smem, k_full,
    k_empty, v_full, v_empty, turns, scale, v_scale, HALF: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr,
    DIM: gl.constexpr, CAUSAL: gl.constexpr, ORDERED: gl.constexpr, SINKS: gl.constexpr, QUERIES: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, ITEM: gl.constexpr,
):  # fmt: skip
    """The consumer of rows 64 * HALF to 64 * HALF + 63 of every item of the program."""
    first, last = warpgroups.numbers(starts_ptr)
    bars = k_full, k_empty, v_full, v_empty, turns
    count = 0
    turn = 0
    for number in range(first, last):
        item = items_ptr + number * ITEM
        query, queries, begin, end = gl.load(item), gl.load(item + 1), gl.load(item + 3), gl.load(item + 4)
        position, partial, direct = gl.load(item + 5), gl.load(item + 6), gl.load(item + 7)
        _place_queries(query, queries, q_ptr, order_ptr, q_smem, scale, HALF, HEADS, KV_HEADS, DIM, ORDERED)
        acc, total, peak, count, turn = attend_blocks(
            (q_smem,), (k_smem,), v_smem, bars, begin, end, position, scale, count, turn, HALF, HEADS // KV_HEADS,
            CAUSAL, False, DIM, KEYS, STAGES,
        )  # fmt: skip
        store_results(
            query, queries, partial, direct, order_ptr, out_ptr, partial_ptr, lse_ptr, sinks_ptr, acc, total, peak,
            v_scale, HALF, HEADS, KV_HEADS, DIM, ORDERED, SINKS, QUERIES,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["stride"])
def _attend_specialised(
    q_ptr, k_ptr, v_ptr, table_ptr, items_ptr, starts_ptr, order_ptr, out_ptr, partial_ptr, lse_ptr, sinks_ptr,
    stride, scale, v_scale, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr,
    CAUSAL: gl.constexpr, ORDERED: gl.constexpr, SINKS: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr,
    ITEM: gl.constexpr, STAGES: gl.constexpr, FEEDERS: gl.constexpr, MULTIPLY_REGISTERS: gl.constexpr,
    FEED_REGISTERS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    launching.wait(EARLY, NEXT=False)
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    k_smem = gl.allocate_shared_memory(gl.float16, [STAGES, KEYS, DIM], layout)
    v_smem = gl.allocate_shared_memory(gl.float16, [STAGES, KEYS, DIM], layout)
    q_smem = gl.allocate_shared_memory(gl.float16, [2, 64, DIM], layout)
    k_full, k_empty, v_full, v_empty, turns = barriers(STAGES)
    gl.warp_specialize(
        [
            (_multiply, (
                q_ptr, items_ptr, starts_ptr, order_ptr, out_ptr, partial_ptr, lse_ptr, sinks_ptr, q_smem.index(0),
                k_smem, v_smem, k_full, k_empty, v_full, v_empty, turns, scale, v_scale, 0, HEADS, KV_HEADS,
                DIM, CAUSAL, ORDERED, SINKS, QUERIES, KEYS, STAGES, ITEM,
            )),
            (_multiply, (
                q_ptr, items_ptr, starts_ptr, order_ptr, out_ptr, partial_ptr, lse_ptr, sinks_ptr, q_smem.index(1),
                k_smem, v_smem, k_full, k_empty, v_full, v_empty, turns, scale, v_scale, 1, HEADS, KV_HEADS,
                DIM, CAUSAL, ORDERED, SINKS, QUERIES, KEYS, STAGES, ITEM,
            )),
            (_feed, (
                items_ptr, starts_ptr, table_ptr, k_ptr, v_ptr, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                stride, KV_HEADS, DIM, PAGE, KEYS, STAGES, FEEDERS, ITEM,
            )),
        ],
        [4, FEEDERS],
        [MULTIPLY_REGISTERS, FEED_REGISTERS],
    )  # fmt: skip


# ---------------------------------------------------------------- where it is used


def launch(
    grid: tuple[int, int, int],
    cache: launching.KernelCache | None,
    given: tuple[Any, ...],
    kinds: tuple[Any, ...],
    variant: Variant,
) -> Any:
    """As `attend.attend`, which prepares the arguments that both kernels have. Items must have `starts`."""
    return launching.launch(
        _attend_specialised, grid, cache, *given, *kinds, variant.keys, FIELDS, variant.stages, FEEDERS,
        MULTIPLY_REGISTERS, FEED_REGISTERS, num_warps=variant.warps,
    )  # fmt: skip


VARIANT = Variant(ROWS, KEYS, 4, STAGES, specialised=True)


def applies(shape: Shape, pages: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for these heads."""
    if pages.itemsize > 1 or dtype.itemsize != 2 or shape.head_dim not in DIMS or shape.group > ROWS or shape.cap:
        return False
    return shape.value_dim == shape.head_dim
