"""Linear attention by the gated delta rule for chunks of up to 64 tokens (arXiv 2406.06484, 2412.06464).

With G the sums of a chunk's decays, S the state before it, and rows for its tokens:

    A = strictly lower part of beta_i (k_i k_j) exp(G_i - G_j)              _within_kernel: all chunks at once
    L = (I + A)^-1 diag(beta),   P = lower part of (q_i k_j) exp(G_i - G_j)
    N = L (v - exp(G) k S),   out = exp(G) q S + P N                        _across_kernel: chunk after chunk
    S = exp(G_last) S + (exp(G_last - G) k)^T N

With a decay for each element of a key, G is a vector, and its exponentials are factors of k's and q's elements
(`_within_each_kernel`).

q and k are normalized by factors of rows and columns of these products, so that the products are of what the model
projects. Products are bfloat16, sums and states float32. q, k and v are stored by chunk, with zeros for tokens that a
chunk lacks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.attention.variants import room
from radixrt.worker.cuda.elementwise.launching import KernelCache, launch, wait
from radixrt.worker.cuda.recurrent.convolutions import conv_chunks
from radixrt.worker.cuda.recurrent.cutting import CHUNK_FIELDS, SEQUENCE_FIELDS, TOKENS, Cut
from radixrt.worker.cuda.recurrent.delta import NORM_EPS, DeltaInputs, LayerStates, decay_of, norm_and_gate

if TYPE_CHECKING:
    from radixrt.worker.model.layers.recurrent.delta_net import DeltaNet

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
FACTORS = 4
"""Of each token of a chunk, in `_across_kernel`: of its key, for what the state knows of it, and for what the state
becomes; of its query; and what the whole chunk leaves of the state."""
ROWS = 16
"""Tokens of a chunk whose products are computed one by one, if each element of a key has a decay of its own."""


# ---------------------------------------------------------------- within chunks


@triton.jit
def _loaded(pointers, inside, DIM: tl.constexpr, WIDE: tl.constexpr):
    """What is inside, else 0, if WIDE is more than DIM."""
    if WIDE > DIM:
        return tl.load(pointers, mask=inside, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def dot(a, b, HALF: tl.constexpr):
    """The product of matrices that are rounded to HALF, in float32."""
    return tl.dot(a.to(HALF), b.to(HALF), input_precision="ieee")


@triton.jit
def _merged(found, a, i, j, level: tl.constexpr, HALF: tl.constexpr):
    """Inverses of diagonal blocks of 2^(level + 1), from those of half the size."""
    below = tl.where((i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level), a, 0.0)
    if level == 0:
        return found - below
    else:
        return found - dot(dot(found, below, HALF), found, HALF)


@triton.jit
def _inverse(a, SIZE: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular a[SIZE, SIZE], by inverses of diagonal blocks of twice the size at a
    time: [[P, 0], [E, Q]]^-1 = [[P^-1, 0], [-Q^-1 E P^-1, Q^-1]]. Up to BLOCK only the diagonal blocks are computed.

    (The product of I + a^(2^n), which takes as many multiplications, has terms as large as binomial coefficients where
    keys are alike; here no entry exceeds beta.)"""
    LEVELS: tl.constexpr = BLOCK.bit_length() - 1
    i = tl.arange(0, SIZE)[:, None]
    j = tl.arange(0, SIZE)[None, :]
    if BLOCK > 1:
        COUNT: tl.constexpr = SIZE // BLOCK
        same = tl.arange(0, COUNT)[:, None, None, None] == tl.arange(0, COUNT)[None, None, :, None]
        inner = tl.sum(tl.where(same, tl.reshape(a, (COUNT, BLOCK, COUNT, BLOCK)), 0.0), 2)
        p = tl.arange(0, BLOCK)[None, :, None]
        q = tl.arange(0, BLOCK)[None, None, :]
        blocks = tl.where(p == q, 1.0, tl.zeros([COUNT, BLOCK, BLOCK], tl.float32))
        for level in tl.static_range(LEVELS):
            blocks = _merged(blocks, inner, p, q, level, HALF)
        found = tl.reshape(tl.where(same, blocks[:, :, None, :], 0.0), (SIZE, SIZE))
    else:
        found = tl.where(i == j, 1.0, 0.0)
    for level in tl.static_range(LEVELS, SIZE.bit_length() - 1):
        found = _merged(found, a, i, j, level, HALF)
    return found


@triton.jit
def _within_kernel(
    x_ptr, a_ptr, b_ptr, rates_ptr, dt_bias_ptr, chunks_ptr, solved_ptr, scores_ptr, factors_ptr, scale, a_stride,
    b_stride, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    FACTOR: tl.constexpr, TOKENS: tl.constexpr, FIELDS: tl.constexpr, FACTORS: tl.constexpr, HALF: tl.constexpr,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    head = tl.program_id(0)
    chunk = chunks_ptr + tl.program_id(1) * FIELDS
    begin = tl.load(chunk).to(tl.int64)
    count = tl.load(chunk + 1)
    i = tl.arange(0, TOKENS)
    inside = i < count
    token = begin + i
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    d = tl.arange(0, WIDE)
    WIDTH: tl.constexpr = 2 * KEYS + VALUE_HEADS * VALUE_DIM
    q_at = x_ptr + (tl.program_id(1).to(tl.int64) * TOKENS + i)[:, None] * WIDTH
    q_at += head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + d[None, :]
    q = _loaded(q_at, (d < KEY_DIM)[None, :], KEY_DIM, WIDE)
    k = _loaded(q_at + KEYS, (d < KEY_DIM)[None, :], KEY_DIM, WIDE)
    a = tl.load(a_ptr + token * a_stride + head, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + token * b_stride + head, mask=inside, other=0.0).to(tl.float32)
    decay = decay_of(a, tl.load(rates_ptr + head), tl.load(dt_bias_ptr + head))
    decay = tl.where(inside, decay, 0.0)
    beta = tl.where(inside, FACTOR * tl.sigmoid(b), 0.0)
    sums = tl.cumsum(decay, 0)
    last = tl.sum(decay, 0)
    wide = q.to(tl.float32)
    q_unit = tl.rsqrt(tl.sum(wide * wide, 1) + NORM_EPS) * scale
    wide = k.to(tl.float32)
    unit = tl.rsqrt(tl.sum(wide * wide, 1) + NORM_EPS)
    tile = tl.program_id(1).to(tl.int64) * VALUE_HEADS + head
    factors = factors_ptr + tile * (FACTORS * TOKENS) + i
    kept = tl.exp(sums)
    tl.store(factors, kept * unit)
    tl.store(factors + TOKENS, tl.exp(last - sums) * unit)
    tl.store(factors + 2 * TOKENS, kept * q_unit)
    tl.store(factors + 3 * TOKENS, tl.exp(last + sums * 0.0))
    lower = i[:, None] >= i[None, :]
    between = tl.exp(tl.where(lower, sums[:, None] - sums[None, :], float("-inf"))) * unit[None, :]
    at = tile * (TOKENS * TOKENS) + i[:, None] * TOKENS + i[None, :]
    scores = dot(q, tl.trans(k), HALF) * between * q_unit[:, None]
    tl.store(scores_ptr + at, scores.to(scores_ptr.dtype.element_ty))
    alike = dot(k, tl.trans(k), HALF) * between * (beta * unit)[:, None]
    inverse = _inverse(tl.where(i[:, None] > i[None, :], alike, 0.0), TOKENS, BLOCK, UNIT)
    tl.store(solved_ptr + at, (inverse * beta[None, :]).to(solved_ptr.dtype.element_ty))


@triton.jit
def _row(x, index, row):
    """x[B, N, D] at a row of each block: [B, 1, D]."""
    return tl.sum(tl.where(index == row, x, 0.0), 1, keep_dims=True)


@triton.jit
def _within_each_kernel(
    x_ptr, a_ptr, b_ptr, rates_ptr, dt_bias_ptr, chunks_ptr, solved_ptr, scores_ptr, faded_ptr, left_ptr, scale,
    a_stride, b_stride, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, FACTOR: tl.constexpr, TOKENS: tl.constexpr, FIELDS: tl.constexpr, HALF: tl.constexpr,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    head = tl.program_id(0)
    chunk = chunks_ptr + tl.program_id(1) * FIELDS
    begin = tl.load(chunk).to(tl.int64)
    count = tl.load(chunk + 1)
    i = tl.arange(0, TOKENS)
    inside = i < count
    token = begin + i
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    d = tl.arange(0, KEY_DIM)
    WIDTH: tl.constexpr = 2 * KEYS + VALUE_HEADS * VALUE_DIM
    q_at = x_ptr + (tl.program_id(1).to(tl.int64) * TOKENS + i)[:, None] * WIDTH
    q_at += head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + d[None, :]
    q = tl.load(q_at).to(tl.float32)
    k = tl.load(q_at + KEYS).to(tl.float32)
    of_a = head * KEY_DIM + d
    a = tl.load(a_ptr + token[:, None] * a_stride + of_a[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    b = tl.load(b_ptr + token * b_stride + head, mask=inside, other=0.0).to(tl.float32)
    beta = tl.where(inside, FACTOR * tl.sigmoid(b), 0.0)
    decay = decay_of(a, tl.load(rates_ptr + head), tl.load(dt_bias_ptr + of_a)[None, :])
    decay = tl.where(inside[:, None], decay, 0.0)
    sums = tl.cumsum(decay, 0)
    last = tl.sum(decay, 0)
    q *= (tl.rsqrt(tl.sum(q * q, 1) + NORM_EPS) * scale)[:, None]
    k *= tl.rsqrt(tl.sum(k * k, 1) + NORM_EPS)[:, None]
    tile = tl.program_id(1).to(tl.int64) * VALUE_HEADS + head
    at = faded_ptr + tile * (3 * TOKENS * KEY_DIM) + i[:, None] * KEY_DIM + d[None, :]
    kept = tl.exp(sums)
    tl.store(at, (k * kept).to(faded_ptr.dtype.element_ty))
    tl.store(at + TOKENS * KEY_DIM, (k * tl.exp(last[None, :] - sums)).to(faded_ptr.dtype.element_ty))
    tl.store(at + 2 * TOKENS * KEY_DIM, (q * kept).to(faded_ptr.dtype.element_ty))
    tl.store(left_ptr + tile * KEY_DIM + d, tl.exp(last))
    # Blocks of ROWS tokens. Below the diagonal, by the decays from the first token of the rows' block on and up to it,
    # so that no exponent is positive; on it, row by row.
    COUNT: tl.constexpr = TOKENS // ROWS
    inner = tl.arange(0, ROWS)[None, :, None]
    sums = tl.reshape(sums, (COUNT, ROWS, KEY_DIM))
    q, k = tl.reshape(q, (COUNT, ROWS, KEY_DIM)), tl.reshape(k, (COUNT, ROWS, KEY_DIM))
    starts = _row(sums, inner, 0)
    own = tl.exp(sums - starts)
    own_q = tl.reshape((q * own).to(HALF), (TOKENS, KEY_DIM))
    own_k = tl.reshape((k * own).to(HALF), (TOKENS, KEY_DIM))
    number = tl.arange(0, COUNT)[:, None, None]
    block = (i // ROWS)[:, None]
    scores = tl.zeros([TOKENS, TOKENS], tl.float32)
    alike = tl.zeros([TOKENS, TOKENS], tl.float32)
    for n in range(1, COUNT):
        start = tl.sum(tl.where(number == n, starts, 0.0), 0, keep_dims=True)
        before = (tl.exp(tl.where(number < n, start - sums, float("-inf"))) * k).to(HALF)
        before = tl.trans(tl.reshape(before, (TOKENS, KEY_DIM)))
        scores = tl.where(block == n, dot(own_q, before, HALF), scores)
        alike = tl.where(block == n, dot(own_k, before, HALF), alike)
    same = block == (i // ROWS)[None, :]
    for row in range(ROWS):
        key = _row(k, inner, row) * tl.exp(tl.where(inner >= row, sums - _row(sums, inner, row), float("-inf")))
        here = same & (i % ROWS == row)[None, :]
        scores = tl.where(here, tl.reshape(tl.sum(q * key, 2), (TOKENS, 1)), scores)
        alike = tl.where(here, tl.reshape(tl.sum(k * key, 2), (TOKENS, 1)), alike)
    at = tile * (TOKENS * TOKENS) + i[:, None] * TOKENS + i[None, :]
    tl.store(scores_ptr + at, scores.to(scores_ptr.dtype.element_ty))
    alike = tl.where(i[:, None] > i[None, :], alike * beta[:, None], 0.0)
    inverse = _inverse(alike, TOKENS, BLOCK, UNIT)
    tl.store(solved_ptr + at, (inverse * beta[None, :]).to(solved_ptr.dtype.element_ty))


# ---------------------------------------------------------------- from chunk to chunk


@triton.jit
def _across_kernel(
    x_ptr, solved_ptr, scores_ptr, factors_ptr, faded_ptr, chunks_ptr, sequences_ptr, states_ptr, out_ptr, state_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr, TOKENS: tl.constexpr, FIELDS: tl.constexpr, CHUNK_FIELDS: tl.constexpr,
    FACTORS: tl.constexpr, EACH: tl.constexpr, HALF: tl.constexpr, STAGES: tl.constexpr, WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    parts: tl.constexpr = VALUE_DIM // COLUMNS
    head = tl.program_id(0) // parts
    sequence = sequences_ptr + tl.program_id(1) * FIELDS
    first = tl.load(sequence)
    chunks = tl.load(sequence + 1)
    slot = tl.load(sequence + 2).to(tl.int64)
    i = tl.arange(0, TOKENS)
    d = tl.arange(0, WIDE)
    real = (d < KEY_DIM)[None, :]
    j = tl.program_id(0) % parts * COLUMNS + tl.arange(0, COLUMNS)
    # Transposed, so that the state, and what corrects it, go from one product to the next in registers.
    state_at = states_ptr + head * (KEY_DIM * VALUE_DIM) + d[None, :] * VALUE_DIM + j[:, None]
    state = _loaded(state_at + slot * state_stride, real, KEY_DIM, WIDE)
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    WIDTH: tl.constexpr = 2 * KEYS + VALUE_HEADS * VALUE_DIM
    of_q = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + d
    of_v = 2 * KEYS + head * VALUE_DIM + j
    of_tile = i[:, None] * TOKENS + i[None, :]
    for n in tl.range(0, chunks, num_stages=STAGES):
        chunk = (first + n).to(tl.int64)
        tile = chunk * VALUE_HEADS + head
        fields = chunks_ptr + chunk * CHUNK_FIELDS
        row = x_ptr + (chunk * TOKENS + i)[:, None] * WIDTH
        v = tl.load(row + of_v[None, :])
        solved = tl.load(solved_ptr + tile * (TOKENS * TOKENS) + of_tile)
        scores = tl.load(scores_ptr + tile * (TOKENS * TOKENS) + of_tile)
        narrow = state.to(HALF)
        if EACH:
            faded = faded_ptr + tile * (3 * TOKENS * KEY_DIM) + i[:, None] * KEY_DIM + d[None, :]
            of_known = tl.load(faded)
            of_state = tl.load(faded + TOKENS * KEY_DIM)
            of_query = tl.load(faded + 2 * TOKENS * KEY_DIM)
            left = tl.load(factors_ptr + tile * KEY_DIM + d)[None, :]
            new = tl.trans(v).to(tl.float32) - dot(narrow, tl.trans(of_known), HALF)
            new = dot(new, tl.trans(solved), HALF)
            out = dot(narrow, tl.trans(of_query), HALF)
            state = state * left + dot(new, of_state, HALF)
        else:
            q = _loaded(row + of_q[None, :], real, KEY_DIM, WIDE)
            k = _loaded(row + (KEYS + of_q)[None, :], real, KEY_DIM, WIDE)
            factors = factors_ptr + tile * (FACTORS * TOKENS) + i
            of_known, of_state, of_query = tl.load(factors), tl.load(factors + TOKENS), tl.load(factors + 2 * TOKENS)
            left = tl.load(factors_ptr + tile * (FACTORS * TOKENS) + 3 * TOKENS)
            new = tl.trans(v).to(tl.float32) - dot(narrow, tl.trans(k), HALF) * of_known[None, :]
            new = dot(new, tl.trans(solved), HALF)
            out = dot(narrow, tl.trans(q), HALF) * of_query[None, :]
            state = state * left + dot(new * of_state[None, :], k, HALF)
        out += dot(new, tl.trans(scores), HALF)
        t = tl.load(fields).to(tl.int64) + i
        inside = i < tl.load(fields + 1)
        out_at = out_ptr + (t * VALUE_HEADS + head)[None, :] * VALUE_DIM + j[:, None]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=inside[None, :])
        stored = tl.load(fields + 5).to(tl.int64)
        if stored > 0:
            tl.store(state_at + stored * state_stride, state, mask=real)
    if slot > 0:
        tl.store(state_at + slot * state_stride, state, mask=real)


# ---------------------------------------------------------------- a layer


@dataclass(frozen=True, slots=True)
class Tiles:
    """Parameters that the kernels are compiled with."""

    within_warps: int = 4
    each_warps: int = 4
    block: int = 16
    """Size of the diagonal blocks that are inverted on their own."""
    columns: int = 64
    """Columns of the state that a program takes from chunk to chunk: 16 for each warp."""
    warps: int = 4
    stages: int = 3


@functools.cache
def best_tiles() -> Tiles:
    """As fast as was found (bench/delta.py --sweep), and with fewer stages where shared memory is small."""
    return Tiles(stages=3 if room() > 200_000 else 2 if room() > 130_000 else 1)


def convolved(
    net: DeltaNet, x: torch.Tensor, states: LayerStates, lists: Cut, cache: KernelCache | None = None
) -> torch.Tensor:
    """q, k and v of the chunks in `lists`, from what a layer projects, x[T, channels]: [chunks, TOKENS, channels]."""
    out = x.new_empty((len(lists.chunks), lists.tokens, x.shape[1]))
    conv_chunks(x, net, states.conv, lists, out, cache, whole=True)
    return out


def by_chunks(
    x: torch.Tensor, inputs: DeltaInputs, net: DeltaNet, states: LayerStates, lists: Cut, out: torch.Tensor,
    cache: KernelCache | None = None, first: int = 0, tiles: Tiles | None = None,
) -> None:  # fmt: skip
    """What `delta.by_tokens` does, for the tokens of the chunks in `lists`; x[chunks, TOKENS, channels] has zeros for
    tokens that a chunk lacks. Results of tokens before the `first` one stay."""
    spec, tiles = net.spec, tiles or best_tiles()
    number, heads = len(lists.chunks), spec.value_heads
    solved, scores = x.new_empty((2, number, heads, TOKENS, TOKENS))
    each = net.ups is not None
    half, keys = TYPES[x.dtype], triton.next_power_of_2(spec.key_dim)
    unit = tl.float32 if half == tl.float32 else tl.float16
    sizes = spec.key_heads, heads, spec.key_dim, spec.value_dim
    given = x, inputs.a, inputs.b, net.rates, net.dt_bias, lists.chunks, solved, scores
    numbers = spec.key_dim**-0.5, inputs.a.stride(0), inputs.b.stride(0), *sizes, spec.beta_factor, TOKENS, CHUNK_FIELDS
    if each:
        factors = x.new_empty((number, heads, spec.key_dim), dtype=torch.float32)
        faded = x.new_empty((number, heads, 3, TOKENS, spec.key_dim))
        launch(
            _within_each_kernel, (heads, number, 1), cache,
            *given, faded, factors, *numbers, half, unit, tiles.block, ROWS, num_warps=tiles.each_warps, num_stages=1,
        )  # fmt: skip
    else:
        factors = faded = x.new_empty((number, heads, FACTORS, TOKENS), dtype=torch.float32)
        launch(
            _within_kernel, (heads, number, 1), cache,
            *given, factors, *numbers, FACTORS, half, unit, tiles.block, keys, num_warps=tiles.within_warps,
            num_stages=1,
        )  # fmt: skip
    columns = min(tiles.columns, spec.value_dim)
    launch(
        _across_kernel, (heads * spec.value_dim // columns, len(lists.sequences), 1), cache,
        x, solved, scores, factors, faded, lists.chunks, lists.sequences, states.rule, out, states.rule.stride(0),
        *sizes, columns, TOKENS, SEQUENCE_FIELDS, CHUNK_FIELDS, FACTORS, each, half, tiles.stages, keys,
        num_warps=tiles.warps,
    )  # fmt: skip
    norm_and_gate(out[first:], inputs.z[first:], net, cache)
