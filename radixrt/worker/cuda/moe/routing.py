"""Chooses the experts of each token, and sorts the rows by expert.

    logits [T, experts] --route--> weights, experts [T, k] --sort--> places of rows, by expert, and tiles of rows

For a single token both are one launch (`begin`), on Hopper together with the router (`router`). Sorting is one launch
where each expert can look at all entries, and three where these are many:

    entries --count--> by block and expert --before--> of the blocks before, and all --put--> places, tiles
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.elementwise.launching import launch, wait
from radixrt.worker.cuda.elementwise.staging import ALIGN
from radixrt.worker.cuda.linear.quantize_activations import launch_sizes, room, store_fp8
from radixrt.worker.model.layers.fp8 import LIMIT, Fp8Activations, Fp8Scaling
from radixrt.worker.model.spec.expert_spec import Routing

TILE_FIELDS = 3
"""Integers of a tile: its expert, the first of its sorted rows, how many rows it has."""
ALIGNED = 8
"""torch's grouped product requires rows of a multiple of this many elements, 16 bytes."""
SORTED = (64, 512, 4096)
"""Entries that a program sorts at a time, one of these sizes."""
AT_ONCE = 4096
"""The most entries that are sorted in one launch."""
BLOCK, BLOCKS = 64, 1024
"""With three launches: entries of a program, and blocks that are summed at a time."""


@triton.jit
def _of_best_groups(choice, e, SIZE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, PAIRS: tl.constexpr):
    """The scores of one token's experts by which they are chosen, -inf outside of its best groups of experts."""
    groups = tl.arange(0, triton.next_power_of_2(GROUPS))
    best = tl.full([triton.next_power_of_2(GROUPS)], float("-inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        own = tl.where(e // SIZE == group, choice, float("-inf"))
        score = tl.max(own, 0)
        if PAIRS:
            score += tl.max(tl.where(e == tl.argmax(own, 0), float("-inf"), own), 0)
        best = tl.where(groups == group, score, best)
    kept = e < 0
    for _ in tl.static_range(KEPT):
        group = tl.argmax(best, 0)
        kept = kept | (e // SIZE == group)
        best = tl.where(groups == group, float("-inf"), best)
    return tl.where(kept, choice, float("-inf"))


@triton.jit
def _mixed_share(logits, left, best, JITTER: tl.constexpr):
    """The weight of expert `best`, the likeliest of those that are left, by SparseMixer (see `moe.sparse_mixer`)."""
    peak = tl.max(left, 0)
    far = (peak - logits) / tl.maximum(tl.abs(logits), peak) > 2 * JITTER
    return 1 / tl.sum(tl.where(far, 0.0, tl.exp(left - peak)), 0)


@triton.jit
def route_token(
    logits_ptr, bias_ptr, weights_ptr, experts_ptr, token, count, CHOSEN: tl.constexpr, NORMALIZED: tl.constexpr,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr, SIGMOID: tl.constexpr, BIASED: tl.constexpr, SIZE: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, FACTOR: tl.constexpr, MIN_SUM: tl.constexpr, JITTER: tl.constexpr,
):  # fmt: skip
    """Choose the experts of one token, and store their weights and numbers; returns the numbers."""
    e = tl.arange(0, BLOCK)
    slot = tl.arange(0, SLOTS)
    at = logits_ptr + token * count + e  # not from the L1 cache: other programs may just have written them (`router`)
    logits = tl.load(at, mask=e < count, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
    nan = tl.max((logits != logits).to(tl.int32), 0) > 0
    left = tl.where(logits == logits, logits, float("-inf"))  # with NaN there would be no valid expert number
    peak = tl.max(left, 0)
    total = tl.sum(tl.exp(left - peak), 0)
    scores = left
    if SIGMOID:
        scores = 1 / (1 + tl.exp(-left))
    elif BIASED:
        scores = tl.exp(left - peak) / total
    if BIASED:
        left = scores + tl.load(bias_ptr + e, mask=e < count, other=float("-inf"))
    if KEPT < GROUPS:
        left = _of_best_groups(left, e, SIZE, GROUPS, KEPT, SIGMOID)
    shares = tl.zeros([SLOTS], tl.float32)
    experts = tl.zeros([SLOTS], tl.int32)
    for i in tl.static_range(CHOSEN):
        best = tl.argmax(left, 0)
        if JITTER >= 0:
            share = _mixed_share(logits, left, best, JITTER)
        elif BIASED or SIGMOID:
            share = tl.sum(tl.where(e == best, scores, 0.0), 0)
        else:
            share = tl.exp(tl.max(left, 0) - peak) / total
        shares = tl.where(slot == i, share, shares)
        experts = tl.where(slot == i, best.to(tl.int32), experts)
        left = tl.where(e == best, float("-inf"), left)
    if NORMALIZED:
        shares = shares / tl.maximum(tl.sum(shares, 0), MIN_SUM)
    if FACTOR != 1.0:
        shares = shares * FACTOR
    shares = tl.where(nan, float("nan"), shares)
    at = token * CHOSEN + slot
    tl.store(weights_ptr + at, shares.to(weights_ptr.dtype.element_ty), mask=slot < CHOSEN)
    tl.store(experts_ptr + at, experts, mask=slot < CHOSEN)
    return experts


@triton.jit
def place_single(
    experts, places_ptr, tokens_ptr, tiles_ptr, CHOSEN: tl.constexpr, SLOTS: tl.constexpr, FIELDS: tl.constexpr
):  # fmt: skip
    """Store the order of the rows of a single token, which has these experts."""
    slot = tl.arange(0, SLOTS)
    there = slot < CHOSEN
    tl.store(places_ptr + slot, slot, mask=there)
    tl.store(tokens_ptr + slot, slot * 0, mask=there)
    tl.store(tiles_ptr + slot * FIELDS, experts, mask=there)
    tl.store(tiles_ptr + slot * FIELDS + 1, slot, mask=there)
    tl.store(tiles_ptr + slot * FIELDS + 2, slot * 0 + 1, mask=there)


@triton.jit
def _route_kernel(
    logits_ptr, bias_ptr, weights_ptr, experts_ptr, count, CHOSEN: tl.constexpr, NORMALIZED: tl.constexpr,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr, SIGMOID: tl.constexpr, BIASED: tl.constexpr, SIZE: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, FACTOR: tl.constexpr, MIN_SUM: tl.constexpr, JITTER: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    token = tl.program_id(0).to(tl.int64)
    route_token(
        logits_ptr, bias_ptr, weights_ptr, experts_ptr, token, count, CHOSEN, NORMALIZED, BLOCK, SLOTS, SIGMOID,
        BIASED, SIZE, GROUPS, KEPT, FACTOR, MIN_SUM, JITTER,
    )  # fmt: skip


PLAIN = Routing()


def compile_time(routing: Routing, count: int) -> tuple[bool, bool, int, int, int, float, float, float]:
    """The compile-time parameters of `route_token` for `count` experts. A jitter below 0: there is none."""
    groups = count // routing.groups, routing.groups, routing.kept_groups
    jitter = -1.0 if routing.jitter is None else routing.jitter
    return routing.sigmoid, routing.has_bias, *groups, routing.factor, routing.min_weight_sum, jitter


def route(
    logits: torch.Tensor, chosen: int, normalized: bool, routing: Routing = PLAIN, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's experts by logits[T, E] (see `Experts.route`). Returns (weights in the dtype of the logits,
    int32 numbers), both [T, chosen], the most likely first. `normalized`: the weights of a token sum to 1, before they
    are scaled. Where logits are NaN, so are weights."""
    tokens, count = logits.shape
    weights = torch.empty((tokens, chosen), dtype=logits.dtype, device=logits.device)
    experts = torch.empty((tokens, chosen), dtype=torch.int32, device=logits.device)
    launch(
        _route_kernel, (tokens,), None,
        logits, logits if bias is None else bias, weights, experts, count, chosen, normalized,
        triton.next_power_of_2(count), triton.next_power_of_2(chosen), *compile_time(routing, count), num_warps=1,
    )  # fmt: skip
    return weights, experts


@triton.jit
def _cut(tiles_ptr, mine, last, counts, bins, most, ROWS: tl.constexpr, FIELDS: tl.constexpr, TILES: tl.constexpr):
    """Write the tiles of an expert, given the counts of all experts; returns its first row."""
    begin = tl.sum(tl.where(bins < mine, counts, 0), 0)
    count = tl.sum(tl.where(bins == mine, counts, 0), 0)
    tile = tl.sum(tl.where(bins < mine, (counts + ROWS - 1) // ROWS, 0), 0)
    # The last expert also writes all unused tiles, which have no rows.
    end = tl.where(mine == last, most, tile + (count + ROWS - 1) // ROWS)
    for first in range(tile, end, TILES):
        t = first + tl.arange(0, TILES)
        row = (t - tile) * ROWS
        fields = tiles_ptr + t * FIELDS
        tl.store(fields, mine, mask=t < end)
        tl.store(fields + 1, begin + row, mask=t < end)
        tl.store(fields + 2, tl.minimum(tl.maximum(count - row, 0), ROWS), mask=t < end)
    return begin


@triton.jit(do_not_specialize=["entries", "most"])
def _sort_kernel(
    experts_ptr, places_ptr, tokens_ptr, ends_ptr, tiles_ptr, entries, most, CHOSEN: tl.constexpr, ROWS: tl.constexpr,
    BINS: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr, TILES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    mine = tl.program_id(0)
    last = tl.num_programs(0) - 1
    i = tl.arange(0, BLOCK)
    if ROWS == 0:
        before = tl.zeros([BLOCK], tl.int32)
        for at in range(0, entries, BLOCK):
            expert = tl.load(experts_ptr + at + i, mask=at + i < entries, other=last + 1)
            before += (expert < mine).to(tl.int32)
        begin = tl.sum(before, 0)
    else:
        # One bin more than there are experts, for lanes past the end.
        bins = tl.arange(0, BINS)
        counts = tl.zeros([BINS], tl.int32)
        for at in range(0, entries, BLOCK):
            expert = tl.load(experts_ptr + at + i, mask=at + i < entries, other=last + 1)
            counts += tl.histogram(expert, BINS)
        begin = _cut(tiles_ptr, mine, last, counts, bins, most, ROWS, FIELDS, TILES)
    for at in range(0, entries, BLOCK):
        expert = tl.load(experts_ptr + at + i, mask=at + i < entries, other=last + 1)
        hit = (expert == mine).to(tl.int32)
        place = begin + tl.cumsum(hit, 0) - hit
        tl.store(places_ptr + at + i, place, mask=hit > 0)
        tl.store(tokens_ptr + place, (at + i) // CHOSEN, mask=hit > 0)
        begin += tl.sum(hit, 0)
    tl.store(ends_ptr + mine, begin)


@triton.jit(do_not_specialize=["entries"])
def _count_kernel(
    experts_ptr, counts_ptr, entries, count, BINS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    wait(EARLY)
    block = tl.program_id(0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    bins = tl.arange(0, BINS)
    # One bin more than there are experts, for lanes past the end.
    found = tl.histogram(tl.load(experts_ptr + i, mask=i < entries, other=count), BINS)
    tl.store(counts_ptr + block * count + bins, found, mask=bins < count)


@triton.jit(do_not_specialize=["blocks"])
def _before_kernel(counts_ptr, totals_ptr, blocks, count, BLOCKS: tl.constexpr, EARLY: tl.constexpr):
    wait(EARLY)
    expert = tl.program_id(0)
    total = 0
    for first in range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        found = tl.load(counts_ptr + block * count + expert, mask=block < blocks, other=0)
        tl.store(counts_ptr + block * count + expert, total + tl.cumsum(found, 0) - found, mask=block < blocks)
        total += tl.sum(found, 0)
    tl.store(totals_ptr + expert, total)


@triton.jit(do_not_specialize=["entries", "blocks", "most"])
def _put_kernel(
    experts_ptr, counts_ptr, totals_ptr, places_ptr, tokens_ptr, ends_ptr, tiles_ptr, entries, blocks, count, most,
    CHOSEN: tl.constexpr, ROWS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr,
    TILES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    mine = tl.program_id(0)
    bins = tl.arange(0, BINS)
    totals = tl.load(totals_ptr + bins, mask=bins < count, other=0)
    if mine < blocks:
        i = tl.arange(0, BLOCK)
        at = mine * BLOCK + i
        expert = tl.load(experts_ptr + at, mask=at < entries, other=count)
        ahead = (expert[None, :] == expert[:, None]) & (i[None, :] < i[:, None])
        place = tl.sum(tl.where(bins[None, :] < expert[:, None], totals[None, :], 0), 1) + tl.sum(ahead.to(tl.int32), 1)
        place += tl.load(counts_ptr + mine * count + expert, mask=at < entries, other=0)
        tl.store(places_ptr + at, place, mask=at < entries)
        tl.store(tokens_ptr + place, at // CHOSEN, mask=at < entries)
    if mine < count:
        tl.store(ends_ptr + mine, tl.sum(tl.where(bins <= mine, totals, 0), 0))
        if ROWS > 0:
            _cut(tiles_ptr, mine, count - 1, totals, bins, most, ROWS, FIELDS, TILES)


@dataclass(frozen=True, slots=True)
class Order:
    """An order of rows by expert; a token has one row for each of its experts. All tensors are int32."""

    places: torch.Tensor
    """[T, chosen]: the sorted row of each token and choice."""
    tokens: torch.Tensor
    """[T * chosen]: the token of each sorted row."""
    ends: torch.Tensor | None
    """[E]: the end of each expert's sorted rows. None for a single token, whose rows are in the order of choice."""
    tiles: torch.Tensor
    """[most, TILE_FIELDS]: runs of rows of one expert. Unused tiles have 0 rows."""
    experts: torch.Tensor
    """[T, chosen]: the experts of each token."""


def tensors(sizes: tuple[int, ...], device: torch.device) -> Iterator[torch.Tensor]:
    """Uninitialized int32 tensors in one allocation, each aligned as kernels are compiled for."""
    most = [-(-size // ALIGN) * ALIGN for size in sizes]
    whole = torch.empty(sum(most), dtype=torch.int32, device=device)
    return (piece[:size] for piece, size in zip(whole.split(most), sizes, strict=True))


def sort(experts: torch.Tensor, count: int, rows: int) -> Order:
    """Sort the rows of int32 experts[T, chosen], of `count` experts. Tiles have at most `rows` rows; 0: no tiles."""
    entries, chosen = experts.numel(), experts.shape[1]
    most = min(entries, entries // rows + count) if rows else 0
    sizes = entries, entries, count, most * TILE_FIELDS
    places, tokens, ends, tiles = tensors(sizes, experts.device)
    if entries > AT_ONCE:
        blocks, bins = triton.cdiv(entries, BLOCK), triton.next_power_of_2(count + 1)
        counts, totals = tensors((blocks * count, count), experts.device)
        launch(_count_kernel, (blocks,), None, experts, counts, entries, count, bins, BLOCK, num_warps=2)
        launch(_before_kernel, (count,), None, counts, totals, blocks, count, BLOCKS, num_warps=4)
        launch(
            _put_kernel, (max(blocks, count),), None,
            experts, counts, totals, places, tokens, ends, tiles, entries, blocks, count, most, chosen, rows, bins,
            BLOCK, TILE_FIELDS, 128, num_warps=4,
        )  # fmt: skip
    else:
        block = next((size for size in SORTED if size >= entries), SORTED[-1])
        launch(
            _sort_kernel, (count,), None,
            experts, places, tokens, ends, tiles, entries, most, chosen, rows, triton.next_power_of_2(count + 1), block,
            TILE_FIELDS, 128, num_warps=4 if block < SORTED[-1] else 8,
        )  # fmt: skip
    return Order(places.view(-1, chosen), tokens, ends, tiles.view(most, TILE_FIELDS), experts)


@triton.jit(do_not_specialize=["stride"])
def _begin_kernel(
    logits_ptr, bias_ptr, weights_ptr, experts_ptr, places_ptr, tokens_ptr, tiles_ptr, x_ptr, values_ptr, scales_ptr,
    count, size, stride, CHOSEN: tl.constexpr, NORMALIZED: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
    SIGMOID: tl.constexpr, BIASED: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    FACTOR: tl.constexpr, MIN_SUM: tl.constexpr, JITTER: tl.constexpr, FIELDS: tl.constexpr, SINGLE: tl.constexpr,
    LIMIT: tl.constexpr, GROUP: tl.constexpr, ALL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        experts = route_token(
            logits_ptr, bias_ptr, weights_ptr, experts_ptr, token, count, CHOSEN, NORMALIZED, BLOCK, SLOTS, SIGMOID,
            BIASED, SIZE, GROUPS, KEPT, FACTOR, MIN_SUM, JITTER,
        )  # fmt: skip
        if SINGLE:
            place_single(experts, places_ptr, tokens_ptr, tiles_ptr, CHOSEN, SLOTS, FIELDS)
    elif GROUP > 0:
        i = tl.arange(0, ALL)
        x = tl.load(x_ptr + token * size + i, mask=i < size, other=0.0).to(tl.float32)
        store_fp8(x, values_ptr, scales_ptr, token, size, stride, LIMIT, GROUP, ALL)


def begin(
    logits: torch.Tensor, chosen: int, normalized: bool, rows: int, x: torch.Tensor, fp8_scaling: Fp8Scaling | None,
    routing: Routing = PLAIN, bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Order, Fp8Activations | None]:  # fmt: skip
    """Returns the weights of `route`, the order of `sort` with tiles of `rows` rows, and with an `fp8_scaling` x[T,
    hidden] in FP8. One launch for a single token, which needs no sorting; otherwise several."""
    (tokens, count), size = logits.shape, x.shape[1]
    weights = torch.empty((tokens, chosen), dtype=logits.dtype, device=logits.device)
    sizes = chosen, chosen, chosen * TILE_FIELDS, tokens * chosen
    places, of_tokens, tiles, experts = tensors(sizes, logits.device)
    known = room(tokens, size, fp8_scaling, x.device) if fp8_scaling else None
    values, scales, stride = (known.values, known.scales, known.scales.stride(1)) if known else (x, x, 0)
    group, block, _ = launch_sizes(size, fp8_scaling)
    launch(
        _begin_kernel, (tokens, 2 if known else 1), None,
        logits, logits if bias is None else bias, weights, experts, places, of_tokens, tiles, x, values, scales, count,
        size, stride, chosen, normalized, triton.next_power_of_2(count), triton.next_power_of_2(chosen),
        *compile_time(routing, count), TILE_FIELDS, tokens == 1, LIMIT, group, block,
        num_warps=max(1, min(8, block // 2048)) if known else 1,
    )  # fmt: skip
    experts = experts.view(tokens, chosen)
    if tokens == 1:
        return weights, Order(places.view(1, chosen), of_tokens, None, tiles.view(chosen, TILE_FIELDS), experts), known
    return weights, sort(experts, count, rows), known
