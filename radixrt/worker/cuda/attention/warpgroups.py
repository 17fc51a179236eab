"""The common part of the attention kernels for Hopper (`hopper`, `hopper_full`): two consumer warpgroups of 64 rows
each that take turns: one multiplies while the other computes its softmax (as FlashAttention-3, arXiv 2407.08608).

    producer                  K, V of a block into shared memory, a block ahead
                                                      |  full            ^  empty
    two consumer warpgroups   scores of block n, while the weights of block n - 1 are multiplied with its values

Blocks of an item go from its last keys to its first, so that only the first blocks need a mask. Written in Gluon, the
language below Triton, where layouts and barriers are explicit. Because another compiler version may produce something
else, results are compared with another kernel before a kernel is used (`agrees`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from radixrt.worker.cuda.elementwise.launching import LOG2_E

log = logging.getLogger("radixrt.cuda")

copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_back = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
"""Copies by the copy engine (TMA), into shared memory and from there, by the names that Triton 3.9 and newer or older
versions have for them."""
ROWS = 128
"""Rows of a program: two warpgroups of 64."""
KEYS = 128
STAGES = 2
ALIKE = 1e-2
"""The largest relative difference to the other kernel; each has an error of up to 4e-3."""


# ---------------------------------------------------------------- the work


@gluon.jit
def numbers(starts_ptr):
    """Returns (the first item of the program, the end of its items)."""
    return gl.load(starts_ptr + gl.program_id(1)), gl.load(starts_ptr + gl.program_id(1) + 1)


@gluon.jit
def count_blocks(begin, end, KEYS: gl.constexpr):
    return gl.maximum((end - begin + KEYS - 1) // KEYS, 1)


@gluon.jit
def barriers(STAGES: gl.constexpr):
    """The barriers `full` and `empty` of K and of V, by stage, and those of the warpgroups' turns."""
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    return k_full, k_empty, v_full, v_empty, turns


# ---------------------------------------------------------------- the softmax


def _rescale_asm(count: int) -> str:
    """Assembly that multiplies the `count` accumulators of a thread, pairs of which belong to two rows by turns;
    skipped if all factors of the warp are 1."""
    times = "".join(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count))
    return (
        f"{{.reg .pred p, q; setp.neu.f32 p, ${2 * count}, 0f3F800000; setp.neu.f32 q, ${2 * count + 2}, 0f3F800000; "
        f"or.pred p, p, q; vote.sync.any.pred p, p, 0xffffffff; @!p bra DONE; {times} DONE: }}"
    )


def _rescale_constraints(count: int) -> str:
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


HIGHER = gl.constexpr(8.0)
RESCALE_64, CONSTRAINTS_64 = gl.constexpr(_rescale_asm(64)), gl.constexpr(_rescale_constraints(64))
RESCALE_32, CONSTRAINTS_32 = gl.constexpr(_rescale_asm(32)), gl.constexpr(_rescale_constraints(32))


@gluon.jit
def _rescaled(acc, keep, DIM: gl.constexpr):
    keep = keep[:, None].broadcast_to([64, DIM])
    if DIM == 128:
        return gl.inline_asm_elementwise(
            RESCALE_64, CONSTRAINTS_64, [acc, keep], dtype=gl.float32, is_pure=False, pack=64
        )
    else:
        return gl.inline_asm_elementwise(
            RESCALE_32, CONSTRAINTS_32, [acc, keep], dtype=gl.float32, is_pure=False, pack=32
        )


@gluon.jit
def _masked(s, key, seen, KEYS: gl.constexpr, S: gl.constexpr):
    n = gl.arange(0, KEYS, layout=gl.SliceLayout(0, S))
    return gl.where(n[None, :] <= (seen - key)[:, None], s, -1e30)


@gluon.jit
def _softmax(
    s, peak, scale, SCALED: gl.constexpr, TYPE: gl.constexpr, KEYS: gl.constexpr, S: gl.constexpr, T: gl.constexpr
):
    """One block of an online softmax. Returns (weights of a TYPE, their sums by thread [64, 8], the new peak, the
    factor of the sums so far). With SCALED, the scores are multiplied by `scale` already.

    The peak follows the scores only where they exceed it by more than HIGHER, so that sums are seldom rescaled. Weights
    are then up to 2 ** HIGHER, which float16 represents with the same relative precision as 1."""
    # [64, KEYS] as [64, KEYS / 8, 8], whose middle dimension is within a thread: short independent chains of
    # operations.
    most = gl.max(gl.max(s.reshape([64, KEYS // 8, 8]), 1), 1)
    most = gl.convert_layout(most, gl.SliceLayout(1, S))
    if SCALED:
        most = most * scale
        s = s * scale
    higher = gl.where(most > peak + HIGHER, most, peak)
    keep = gl.exp2(peak - higher)
    p = gl.exp2(s - higher[:, None])
    sums = gl.convert_layout(gl.sum(p.reshape([64, KEYS // 8, 8]), 1), T)
    return p.to(TYPE), sums, higher, keep


# ---------------------------------------------------------------- an item


@gluon.jit
def _scores(q, k_smem, stage, S: gl.constexpr, KEYS: gl.constexpr):
    """Start the product of q and keys, tuples of as many parts; asynchronous."""
    s = gl.zeros([64, KEYS], gl.float32, layout=S)
    for i in gl.static_range(len(q)):
        s = warpgroup_mma(q[i], k_smem[i].index(stage).permute((1, 0)), s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def attend_blocks(
    q, k_smem, v_smem, bars, begin, end, position, scale, count, turn, HALF: gl.constexpr, GROUP: gl.constexpr,
    CAUSAL: gl.constexpr, SCALED: gl.constexpr, DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Attention of rows 64 * HALF to 64 * HALF + 63 of an item; GROUP heads of a query are neighbouring rows. Returns
    (weighted sums of values [64, DIM], sums of weights by thread, peaks, blocks so far, turns so far). q and `k_smem`
    are tuples of as many parts; `bars` is from `barriers`."""
    k_full, k_empty, v_full, v_empty, turns = bars
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    # The layout that S has for the first 8 of its keys. (A is the layout of the accumulator, P that of the weights.)
    T: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [8, 0]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 8]
    )
    TYPE: gl.constexpr = v_smem.dtype
    m = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, S))
    blocks = count_blocks(begin, end, KEYS)
    key = begin + (blocks - 1) * KEYS
    seen = gl.full([64], 0, gl.int32, gl.SliceLayout(1, S)) + (end - 1)  # the last key that a row sees
    limit = end - 1  # blocks with keys after it are masked
    if CAUSAL:
        seen = gl.minimum(seen, position + m // GROUP)
        limit = gl.minimum(limit, position)

    stage = count % STAGES
    mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
    s = _scores(q, k_smem, stage, S, KEYS)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(stage))
    if key + KEYS - 1 > limit:
        s = _masked(s, key, seen, KEYS, S)
    # Less than any score, more than masked ones: a row that sees none of a block's keys gets weights of 0.
    peak = gl.full([64], -1e20, gl.float32, gl.SliceLayout(1, S))
    weights, total, peak, keep = _softmax(s, peak, scale, SCALED, TYPE, KEYS, S, T)
    p = gl.convert_layout(weights, P)
    acc = gl.zeros([64, DIM], gl.float32, A)
    count += 1
    mbarrier.wait(k_full.index(count % STAGES), (count // STAGES) & 1, pred=blocks > 1)
    for i in range(1, blocks):
        # Scores of this block, while the weights of the block before are multiplied with its values.
        key -= KEYS
        stage = count % STAGES
        old = (count + STAGES - 1) % STAGES
        mbarrier.wait(turns.index(HALF), (turn & 1) ^ (1 - HALF))
        s = _scores(q, k_smem, stage, S, KEYS)
        mbarrier.wait(v_full.index(old), ((count - 1) // STAGES) & 1)
        acc = warpgroup_mma(p, v_smem.index(old), acc, is_async=True)
        mbarrier.arrive(turns.index(1 - HALF))
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_empty.index(stage))
        if CAUSAL:
            if key + KEYS - 1 > limit:
                s = _masked(s, key, seen, KEYS, S)
        weights, sums, peak, keep = _softmax(s, peak, scale, SCALED, TYPE, KEYS, S, T)
        total = total * gl.convert_layout(keep, gl.SliceLayout(1, T))[:, None] + sums
        p = gl.convert_layout(weights, P)
        count += 1
        turn += 1
        # Waiting here puts a branch before the next wait. Without one the assembler moves the softmax behind that.
        mbarrier.wait(k_full.index(count % STAGES), (count // STAGES) & 1, pred=i + 1 < blocks)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(old))
        acc = _rescaled(acc, gl.convert_layout(keep, gl.SliceLayout(1, A)), DIM)
    old = (count + STAGES - 1) % STAGES
    mbarrier.wait(v_full.index(old), ((count - 1) // STAGES) & 1)
    acc = warpgroup_mma(p, v_smem.index(old), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(old))
    return acc, total, peak, count, turn


@gluon.jit
def store_results(
    query, queries, partial, direct, order_ptr, out_ptr, partial_ptr, lse_ptr, sinks_ptr, acc, total, peak, v_scale,
    HALF: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, ORDERED: gl.constexpr,
    SINKS: gl.constexpr, QUERIES: gl.constexpr,
):  # fmt: skip
    """Store the results of `attend_blocks` for an item, as the kernel of `attend` does."""
    GROUP: gl.constexpr = HEADS // KV_HEADS
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, A))
    m = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, A))
    d = gl.arange(0, DIM, layout=gl.SliceLayout(0, A))
    own = m // GROUP
    head = gl.program_id(0) * GROUP + m % GROUP
    if SINKS:  # partial results leave the sink out: the merge adds it
        sink = gl.load(sinks_ptr + head) * LOG2_E
        more = gl.exp2(sink - gl.convert_layout(peak, gl.SliceLayout(1, A)))
        whole = total + gl.where(direct != 0, more, 0.0)
    else:
        whole = total
    out = acc * (v_scale / gl.where(whole > 0, whole, 1.0))[:, None]
    real = (own < queries) & (m < QUERIES * GROUP)
    if direct != 0:
        place = query + gl.minimum(own, queries - 1)
        if ORDERED:
            place = gl.load(order_ptr + place)
        at = (place.to(gl.int64) * HEADS + head)[:, None] * DIM + d[None, :]
        gl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=real[:, None])
    else:
        spot = (partial + own).to(gl.int64) * HEADS + head
        gl.store(partial_ptr + spot[:, None] * DIM + d[None, :], out, mask=real[:, None])
        # NaN in the input is propagated: the sum is NaN then, and so is the result.
        lse = gl.where(total == 0, -1e30, gl.convert_layout(peak, gl.SliceLayout(1, A)) + gl.log2(total))
        gl.store(lse_ptr + spot, lse, mask=real)


# ---------------------------------------------------------------- where such a kernel is used


def agrees(apart: Callable[[], float], device: torch.device) -> bool:
    """Whether a kernel for Hopper works on this device; `apart` computes its relative difference to another kernel."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        error = apart()
    except Exception as problem:  # another version of the compiler
        log.warning("the kernel for Hopper is not used: %s: %s", type(problem).__name__, str(problem)[:300])
        return False
    if not error < ALIKE:
        log.warning("the kernel for Hopper is not used: it is %.1e from the other one", error)
        return False
    return True
