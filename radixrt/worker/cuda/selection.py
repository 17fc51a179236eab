"""The slots of the tokens with the highest index scores.

The maxima of groups of tokens have a count-th highest, below which no token is selected. The few tokens that are not
below it are written one after the other, and the exact bound is found among them:

    maxima of groups          _peaks_kernel   several programs for a query, each for some of the groups
    its bound, what is left   _keep_kernel    several programs for a query, each for a part of its tokens
    what is selected          _choose_kernel  one program for a query

Scores are compared as integers in the same order.
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
PROGRAMS, MOST_PARTS = 256, 16
"""Programs of a step, if it has fewer queries; and the most for a query."""


@triton.jit
def _load(scores, at, length):
    """Scores as uint32 of the same order; 0 past `length`. -0 is 0."""
    bits = tl.load(scores + at, mask=at < (length + 15) // 16 * 16, other=0)  # several at once
    bits = tl.where(bits == -(1 << 31), 0, bits)
    ordered = (bits ^ ((bits >> 31) | -(1 << 31))).to(tl.uint32, bitcast=True)
    return tl.where(at < length, ordered, 0)


@triton.jit
def _read(values, at, mask):
    """What was written of scores; else 0."""
    return tl.load(values + at, mask=mask, other=0).to(tl.uint32, bitcast=True)


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
def _at(index, kept, part, PARTS: tl.constexpr):
    """Where the tokens that are left stand, by their number: at the beginning of each part, of `part` tokens."""
    if PARTS == 1:
        return index
    else:
        at = index
        start = tl.load(kept)
        for number in range(1, PARTS):
            at = tl.where(index >= start, number * part + index - start, at)
            start += tl.load(kept + number)
        return at


@triton.jit
def _part(length, PARTS: tl.constexpr):
    """Tokens of a part."""
    return (length + PARTS * 16 - 1) // (PARTS * 16) * 16


@triton.jit
def _slot(table_at, position, mask, PAGE: tl.constexpr):
    if PAGE == 1:
        return tl.load(table_at + position, mask=mask, other=0)
    else:
        return tl.load(table_at + position // PAGE, mask=mask, other=0) * PAGE + position % PAGE


@triton.jit(do_not_specialize=["first"])
def _peaks_kernel(
    scores_ptr, queries_ptr, peaks_ptr, first, columns, COUNT: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    FIELDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    number = tl.program_id(0).to(tl.int64)
    length = tl.load(queries_ptr + (first + number) * FIELDS + 2) + 1
    if length <= COUNT:
        return
    OWN: tl.constexpr = WIDTH // PARTS
    i = tl.program_id(1) * OWN + tl.arange(0, OWN)
    at = tl.arange(0, PARTS)[:, None] * WIDTH + i[None, :]
    peaks = tl.zeros([PARTS, OWN], tl.uint32)
    for begin in range(0, length, PARTS * WIDTH):
        peaks = tl.maximum(peaks, _load(scores_ptr + number * columns, begin + at, length))
    tl.store(peaks_ptr + number * WIDTH + i, tl.max(peaks, 0).to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["first"])
def _keep_kernel(
    scores_ptr, places_ptr, queries_ptr, peaks_ptr, bounds_ptr, kept_ptr, first, columns, COUNT: tl.constexpr,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, FIELDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    number = tl.program_id(0).to(tl.int64)
    length = tl.load(queries_ptr + (first + number) * FIELDS + 2) + 1
    if length <= COUNT:
        return
    i = tl.arange(0, WIDTH)
    peaks = _read(peaks_ptr + number * WIDTH, i, i < WIDTH)
    most = tl.max(peaks, 0)
    bound = _bound(peaks, COUNT, tl.min(tl.where(i < length, peaks, most), 0), most)
    part = _part(length, PARTS)
    start = tl.program_id(1) * part
    end = tl.minimum(start + part, length)
    scores = scores_ptr + number * columns
    to_at = number * columns + start
    left = tl.zeros([], tl.int32)
    for begin in range(start, end, WIDTH):
        values = _load(scores, begin + i, end)
        keep = (values >= bound) & (begin + i < end)
        # Never behind what has been read: a program's threads wait for each other in the sum.
        to = to_at + left + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(scores_ptr + to, values.to(tl.int32, bitcast=True), mask=keep)
        tl.store(places_ptr + to, begin + i, mask=keep)
        left += tl.sum(keep.to(tl.int32), 0)
    tl.store(kept_ptr + number * PARTS + tl.program_id(1), left)
    if tl.program_id(1) == 0:
        tl.store(bounds_ptr + number * 2, bound.to(tl.int32, bitcast=True))
        tl.store(bounds_ptr + number * 2 + 1, most.to(tl.int32, bitcast=True))


@triton.jit
def _bound_of_many(values, kept, part, length, count, least, most, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """As `_bound`, of more values than a program can hold, in memory."""
    i = tl.arange(0, WIDTH)
    bit, found = _first_bit(least, most)
    while bit > 0:
        above = tl.zeros([WIDTH], tl.int32)
        for begin in range(0, length, WIDTH):
            value = _read(values, _at(begin + i, kept, part, PARTS), begin + i < length)
            above += (value >= (found | bit)).to(tl.int32)
        found = tl.where(tl.sum(above, 0) >= count, found | bit, found)
        bit = bit >> 1
    return found


@triton.jit(do_not_specialize=["first", "stride"])
def _choose_kernel(
    scores_ptr, places_ptr, queries_ptr, bounds_ptr, kept_ptr, table_ptr, slots_ptr, first, stride, columns,
    COUNT: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, FIELDS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    number = tl.program_id(0).to(tl.int64)
    query = queries_ptr + (first + number) * FIELDS
    table_at = table_ptr + tl.load(query + 1).to(tl.int64) * stride
    length = tl.load(query + 2) + 1
    slots = slots_ptr + number * COUNT
    i = tl.arange(0, WIDTH)
    if length <= COUNT:  # all are selected
        tl.store(slots + i, _slot(table_at, i, i < length, PAGE), mask=i < length)
        return
    scores = scores_ptr + number * columns
    places = places_ptr + number * columns
    kept = kept_ptr + number * PARTS
    part = _part(length, PARTS)
    left = tl.zeros([], tl.int32)
    for n in range(PARTS):
        left += tl.load(kept + n)
    least = tl.load(bounds_ptr + number * 2).to(tl.uint32, bitcast=True)
    most = tl.load(bounds_ptr + number * 2 + 1).to(tl.uint32, bitcast=True)
    if left <= WIDTH:
        bound = _bound(_read(scores, _at(i, kept, part, PARTS), i < left), COUNT, least, most)
    else:
        bound = _bound_of_many(scores, kept, part, left, COUNT, least, most, WIDTH, PARTS)
    room = tl.full([], COUNT, tl.int32)  # for those at the bound
    for begin in range(0, left, WIDTH):
        values = _read(scores, _at(begin + i, kept, part, PARTS), begin + i < left)
        room -= tl.sum((values > bound).to(tl.int32), 0)
    taken = tl.zeros([], tl.int32)
    for begin in range(0, left, WIDTH):
        here, at = begin + i < left, _at(begin + i, kept, part, PARTS)
        values = _read(scores, at, here)
        equal = ((values == bound) & here).to(tl.int32)
        chosen = (values > bound) | ((equal > 0) & (tl.cumsum(equal, 0) <= room))
        to = taken + tl.cumsum(chosen.to(tl.int32), 0) - 1
        position = tl.load(places + at, mask=chosen, other=0)
        tl.store(slots + to, _slot(table_at, position, chosen, PAGE), mask=chosen)
        room -= tl.sum(equal, 0)
        taken += tl.sum(chosen.to(tl.int32), 0)


def parts_for(queries: int) -> int:
    """Programs for each query, a power of two."""
    return max(1, min(MOST_PARTS, triton.next_power_of_2(PROGRAMS // queries)))


def select(
    scores: torch.Tensor, queries: torch.Tensor, table: torch.Tensor, out: torch.Tensor, page_size: int, first: int = 0
) -> None:
    """Write the slots of the tokens with the highest scores of each query to int32 out[S, count], in the order of their
    positions; among equal scores, those of the first tokens. If a query sees at most `count` tokens, all of them.
    float32 scores[S, columns] are overwritten.

    `queries` and `table` are those of `index_scores`. `columns` is a multiple of 16."""
    number, count = out.shape
    width, parts = max(128, triton.next_power_of_2(GROUPS * count)), parts_for(number)
    bits, places = scores.view(torch.int32), torch.empty_like(scores, dtype=torch.int32)
    peaks, kept, bounds = (out.new_empty((number, n)) for n in (width, parts, 2))
    sizes, warps = (width, parts, QUERY_FIELDS), min(WARPS, width // 128)
    launching.launch(
        _peaks_kernel, (number, parts, 1), None, bits, queries, peaks, first, scores.shape[1], count, *sizes,
        num_warps=warps,
    )  # fmt: skip
    launching.launch(
        _keep_kernel, (number, parts, 1), None, bits, places, queries, peaks, bounds, kept, first, scores.shape[1],
        count, *sizes, num_warps=warps,
    )  # fmt: skip
    launching.launch(
        _choose_kernel, (number, 1, 1), None, bits, places, queries, bounds, kept, table, out, first, table.stride(0),
        scores.shape[1], count, page_size, *sizes, num_warps=warps,
    )  # fmt: skip
