"""The slots of the tokens with the highest index scores.

A program selects for one query, in two passes over its scores. The maxima of groups of tokens have a count-th highest,
below which no token is selected; the few others are written one after the other over the scores, and the exact bound is
found among them. Scores are compared as integers in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixrt.worker.cuda import launching
from radixrt.worker.cuda.index_scores import QUERY_FIELDS
from radixrt.worker.cuda.launching import wait

GROUPS = 2
"""Groups of tokens for each token that is selected: with so many, few others are above the bound."""
WARPS = 8


@triton.jit
def _load(scores, at, length):
    """Scores as uint32 of the same order; 0 past `length`. -0 is 0."""
    bits = tl.load(scores + at, mask=at < (length + 15) // 16 * 16, other=0)  # several at once
    bits = tl.where(bits == -(1 << 31), 0, bits)
    ordered = (bits ^ ((bits >> 31) | -(1 << 31))).to(tl.uint32, bitcast=True)
    return tl.where(at < length, ordered, 0)


@triton.jit
def _read(values, at, length):
    """What was written of scores; 0 past `length`."""
    return tl.load(values + at, mask=at < length, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _first_bit(least, most):
    """(The highest bit in which they differ, 0 if they are equal; what is common above it.)"""
    bit = tl.full([], 1 << 31, tl.uint32)
    while (bit > 0) & (((least ^ most) & bit) == 0):
        bit = bit >> 1
    return bit, tl.where(bit > 0, least & ~(bit | (bit - 1)), least)


@triton.jit
def _bound(values, count, least, most):
    """The count-th highest of uint32 values [N], or a lower bound that only as many reach: one bit after the other. It
    is in [least, most], as all are that count."""
    bit, found = _first_bit(least, most)
    reached = count + 1
    while (bit > 0) & (reached != count):
        total = tl.sum((values >= (found | bit)).to(tl.int32), 0)
        reached = tl.where(total >= count, total, reached)
        found = tl.where(total >= count, found | bit, found)
        bit = bit >> 1
    return found


@triton.jit
def _bound_of_many(values, length, count, least, most, WIDTH: tl.constexpr):
    """As `_bound`, of more values than a program can hold; `values` are in memory."""
    i = tl.arange(0, WIDTH)
    bit, found = _first_bit(least, most)
    while bit > 0:
        above = tl.zeros([WIDTH], tl.int32)
        for begin in range(0, length, WIDTH):
            above += (_read(values, begin + i, length) >= (found | bit)).to(tl.int32)
        found = tl.where(tl.sum(above, 0) >= count, found | bit, found)
        bit = bit >> 1
    return found


@triton.jit
def _slot(table_at, position, mask, PAGE: tl.constexpr):
    if PAGE == 1:
        return tl.load(table_at + position, mask=mask, other=0)
    else:
        return tl.load(table_at + position // PAGE, mask=mask, other=0) * PAGE + position % PAGE


@triton.jit(do_not_specialize=["first", "stride"])
def _select_kernel(
    scores_ptr, places_ptr, queries_ptr, table_ptr, slots_ptr, first, stride, columns, COUNT: tl.constexpr,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, FIELDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    number = tl.program_id(0).to(tl.int64)
    query = queries_ptr + (first + number) * FIELDS
    table_at = table_ptr + tl.load(query + 1).to(tl.int64) * stride
    length = tl.load(query + 2) + 1
    scores = scores_ptr + number * columns
    places = places_ptr + number * columns
    slots = slots_ptr + number * COUNT
    i = tl.arange(0, WIDTH)
    if length <= COUNT:  # all are selected
        tl.store(slots + i, _slot(table_at, i, i < length, PAGE), mask=i < length)
        return
    peaks = tl.zeros([WIDTH], tl.uint32)
    for begin in range(0, length, WIDTH):
        peaks = tl.maximum(peaks, _load(scores, begin + i, length))
    most = tl.max(peaks, 0)
    bound = _bound(peaks, COUNT, tl.min(tl.where(i < length, peaks, most), 0), most)
    left = tl.zeros([], tl.int32)
    for begin in range(0, length, WIDTH):
        values = _load(scores, begin + i, length)
        keep = (values >= bound) & (begin + i < length)
        # Never behind what has been read: a program's threads wait for each other in the sum.
        to = left + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(scores + to, values.to(tl.int32, bitcast=True), mask=keep)
        tl.store(places + to, begin + i, mask=keep)
        left += tl.sum(keep.to(tl.int32), 0)
    tl.debug_barrier()
    if left <= WIDTH:
        bound = _bound(_read(scores, i, left), COUNT, bound, most)
    else:
        bound = _bound_of_many(scores, left, COUNT, bound, most, WIDTH)
    room = tl.full([], COUNT, tl.int32)  # for those at the bound
    for begin in range(0, left, WIDTH):
        room -= tl.sum((_read(scores, begin + i, left) > bound).to(tl.int32), 0)
    taken = tl.zeros([], tl.int32)
    for begin in range(0, left, WIDTH):
        values, here = _read(scores, begin + i, left), begin + i < left
        equal = ((values == bound) & here).to(tl.int32)
        chosen = (values > bound) | ((equal > 0) & (tl.cumsum(equal, 0) <= room))
        to = taken + tl.cumsum(chosen.to(tl.int32), 0) - 1
        position = tl.load(places + begin + i, mask=chosen, other=0)
        tl.store(slots + to, _slot(table_at, position, chosen, PAGE), mask=chosen)
        room -= tl.sum(equal, 0)
        taken += tl.sum(chosen.to(tl.int32), 0)


def select(
    scores: torch.Tensor, queries: torch.Tensor, table: torch.Tensor, out: torch.Tensor, page_size: int, first: int = 0
) -> None:
    """Write the slots of the tokens with the highest scores of each query to int32 out[S, count], in the order of their
    positions; among equal scores, those of the first tokens. If a query sees at most `count` tokens, all of them.
    float32 scores[S, columns] are overwritten.

    `queries` and `table` are those of `index_scores`. `columns` is a multiple of 16."""
    count = out.shape[1]
    width = max(128, triton.next_power_of_2(GROUPS * count))
    launching.launch(
        _select_kernel, (len(out), 1, 1), None,
        scores.view(torch.int32), torch.empty_like(scores, dtype=torch.int32), queries, table, out, first,
        table.stride(0), scores.shape[1], count, page_size, width, QUERY_FIELDS,
        num_warps=min(WARPS, width // 128),
    )  # fmt: skip
