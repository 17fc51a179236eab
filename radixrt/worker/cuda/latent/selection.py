"""The slots of the tokens with the highest index scores.

A program selects for one query, in two passes over its scores. The maxima of groups of tokens have a count-th highest,
below which no token is selected; the few others are written one after the other over the scores, and the exact bound is
found among them. Scores are compared as integers in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.elementwise import launching
from radixrt.worker.cuda.elementwise.launching import wait
from radixrt.worker.cuda.latent.index_scores import QUERY_FIELDS

LOWEST = tl.constexpr(-(1 << 31))
GROUPS = 2
"""Groups of tokens for each token that is selected: with so many, few others are above the bound."""
WARPS = 8


@triton.jit
def _load(scores, at, length):
    """Scores as int32 of the same order; LOWEST past `length`. -0 is 0."""
    bits = tl.load(scores + at, mask=at < (length + 15) // 16 * 16, other=0)  # several at once
    bits = tl.where(bits == LOWEST, 0, bits)
    return tl.where(at < length, bits ^ ((bits >> 31) & 0x7FFFFFFF), LOWEST)


@triton.jit
def _highest(values, count):
    """The count-th highest of int32 values [N], one bit after the other."""
    found = tl.full([], LOWEST, tl.int32)
    bit = found
    for _ in range(32):
        higher = found ^ bit
        found = tl.where(tl.sum((values >= higher).to(tl.int32), 0) >= count, higher, found)
        bit = (bit >> 1) & 0x7FFFFFFF
    return found


@triton.jit
def _highest_of_many(values, length, count, WIDTH: tl.constexpr):
    """As `_highest`, of more values than a program can hold; `values` are in memory."""
    i = tl.arange(0, WIDTH)
    found = tl.full([], LOWEST, tl.int32)
    bit = found
    for _ in range(32):
        higher = found ^ bit
        above = tl.zeros([WIDTH], tl.int32)
        for begin in range(0, length, WIDTH):
            above += (tl.load(values + begin + i, mask=begin + i < length, other=LOWEST) >= higher).to(tl.int32)
        found = tl.where(tl.sum(above, 0) >= count, higher, found)
        bit = (bit >> 1) & 0x7FFFFFFF
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
    peaks = tl.full([WIDTH], LOWEST, tl.int32)
    for begin in range(0, length, WIDTH):
        peaks = tl.maximum(peaks, _load(scores, begin + i, length))
    bound = _highest(peaks, COUNT)
    left = tl.zeros([], tl.int32)
    for begin in range(0, length, WIDTH):
        values = _load(scores, begin + i, length)
        keep = values >= bound
        # Never behind what has been read: a program's threads wait for each other in the sum.
        to = left + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(scores + to, values, mask=keep)
        tl.store(places + to, begin + i, mask=keep)
        left += tl.sum(keep.to(tl.int32), 0)
    tl.debug_barrier()
    if left <= WIDTH:
        bound = _highest(tl.load(scores + i, mask=i < left, other=LOWEST), COUNT)
    else:
        bound = _highest_of_many(scores, left, COUNT, WIDTH)
    above = tl.zeros([], tl.int32)
    for begin in range(0, left, WIDTH):
        above += tl.sum((tl.load(scores + begin + i, mask=begin + i < left, other=LOWEST) > bound).to(tl.int32), 0)
    room = COUNT - above  # for those at the bound
    taken = tl.zeros([], tl.int32)
    for begin in range(0, left, WIDTH):
        values = tl.load(scores + begin + i, mask=begin + i < left, other=LOWEST)
        equal = (values == bound).to(tl.int32)
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
    positions; among equal scores, those of the first tokens. float32 scores[S, columns] are overwritten.

    `queries` and `table` are those of `index_scores`; queries are at positions of at least `count`. `columns` is a
    multiple of 16."""
    count = out.shape[1]
    width = max(128, triton.next_power_of_2(GROUPS * count))
    launching.launch(
        _select_kernel, (len(out), 1, 1), None,
        scores.view(torch.int32), torch.empty_like(scores, dtype=torch.int32), queries, table, out, first,
        table.stride(0), scores.shape[1], count, page_size, width, QUERY_FIELDS,
        num_warps=min(WARPS, width // 128),
    )  # fmt: skip
