"""Linear attention by the gated delta rule for chunks of up to 64 tokens (arXiv 2406.06484, 2412.06464).

With G the sums of a chunk's decays, S the state before it, and rows for its tokens:

    A = strictly lower part of beta_i (k_i k_j) exp(G_i - G_j)              _within_kernel: all chunks at once
    U = (I + A)^-1 (beta v),   W = (I + A)^-1 (beta exp(G) k)
    N = U - W S,   S = exp(G_last) S + (exp(G_last - G) k)^T N              _across_kernel: chunk after chunk
    out = exp(G) q S + (lower part of (q_i k_j) exp(G_i - G_j)) N           _outputs_kernel: all chunks at once

q and k are normalized by factors of rows and columns of these products, so that the products are of what the model
projects. Products are bfloat16, sums and states float32. U, N and S are stored transposed; U and W by chunk, with
zeros for tokens that a chunk lacks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.cutting import CHUNK_FIELDS, SEQUENCE_FIELDS, TOKENS, Cut
from radixrt.worker.cuda.delta import NORM_EPS, DeltaInputs, LayerStates, decay_of, gated_norm
from radixrt.worker.cuda.launching import KernelCache, launch, wait
from radixrt.worker.cuda.variants import room

if TYPE_CHECKING:
    from radixrt.worker.model.delta_net import DeltaNet

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


# ---------------------------------------------------------------- within chunks


@triton.jit
def _dot(a, b, HALF: tl.constexpr):
    return tl.dot(a.to(HALF), b.to(HALF), input_precision="ieee")


@triton.jit
def _merged(found, a, i, j, level: tl.constexpr, HALF: tl.constexpr):
    """Inverses of diagonal blocks of 2^(level + 1), from those of half the size."""
    below = tl.where((i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level), a, 0.0)
    if level == 0:
        return found - below
    else:
        return found - _dot(_dot(found, below, HALF), found, HALF)


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
    x_ptr, a_ptr, b_ptr, rates_ptr, dt_bias_ptr, chunks_ptr, u_ptr, w_ptr, sums_ptr, tails_ptr, a_stride, b_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    FACTOR: tl.constexpr, TOKENS: tl.constexpr, FIELDS: tl.constexpr, HALF: tl.constexpr, UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    head = tl.program_id(0)
    chunk = chunks_ptr + tl.program_id(1) * FIELDS
    begin = tl.load(chunk).to(tl.int64)
    count = tl.load(chunk + 1)
    i = tl.arange(0, TOKENS)
    inside = i < count
    token = begin + i
    a = tl.load(a_ptr + token * a_stride + head, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + token * b_stride + head, mask=inside, other=0.0).to(tl.float32)
    decay = decay_of(a, tl.load(rates_ptr + head), tl.load(dt_bias_ptr + head))
    decay = tl.where(inside, decay, 0.0)
    beta = tl.where(inside, FACTOR * tl.sigmoid(b), 0.0)
    sums = tl.cumsum(decay, 0)
    last = tl.sum(decay, 0)
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    d = tl.arange(0, KEY_DIM)
    e = tl.arange(0, VALUE_DIM)
    x_at = x_ptr + token[:, None] * (2 * KEYS + VALUE_HEADS * VALUE_DIM)
    k_at = x_at + KEYS + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + d[None, :]
    k = tl.load(k_at, mask=inside[:, None], other=0.0)
    wide = k.to(tl.float32)
    unit = tl.rsqrt(tl.sum(wide * wide, 1) + NORM_EPS)
    here = tl.program_id(1).to(tl.int64) * TOKENS
    tl.store(sums_ptr + (here + i) * VALUE_HEADS + head, sums)
    tl.store(tails_ptr + (here + i) * VALUE_HEADS + head, tl.exp(last - sums) * unit)
    lower = i[:, None] > i[None, :]
    between = tl.exp(tl.where(lower, sums[:, None] - sums[None, :], float("-inf")))
    alike = _dot(k, tl.trans(k), HALF) * between * (beta * unit)[:, None] * unit[None, :]
    inverse = _inverse(alike, TOKENS, BLOCK, UNIT)
    w = _dot(inverse * (beta * unit * tl.exp(sums))[None, :], k, HALF)
    tile = tl.program_id(1).to(tl.int64) * VALUE_HEADS + head
    w_at = w_ptr + tile * (TOKENS * KEY_DIM) + i[:, None] * KEY_DIM + d[None, :]
    tl.store(w_at, w.to(w_ptr.dtype.element_ty))
    v = tl.load(x_at + 2 * KEYS + head * VALUE_DIM + e[None, :], mask=inside[:, None], other=0.0)
    u = _dot(inverse * beta[None, :], v, HALF)
    u_at = u_ptr + tile * (VALUE_DIM * TOKENS) + e[None, :] * TOKENS + i[:, None]
    tl.store(u_at, u.to(u_ptr.dtype.element_ty))


# ---------------------------------------------------------------- from chunk to chunk


@triton.jit
def _across_kernel(
    x_ptr, w_ptr, sums_ptr, tails_ptr, sequences_ptr, u_ptr, before_ptr, chunks_ptr, states_ptr, state_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr, TOKENS: tl.constexpr, FIELDS: tl.constexpr, CHUNK_FIELDS: tl.constexpr, HALF: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    parts: tl.constexpr = VALUE_DIM // COLUMNS
    head = tl.program_id(0) // parts
    sequence = sequences_ptr + tl.program_id(1) * FIELDS
    first = tl.load(sequence)
    chunks = tl.load(sequence + 1)
    slot = tl.load(sequence + 2).to(tl.int64)
    i = tl.arange(0, TOKENS)
    d = tl.arange(0, KEY_DIM)
    j = tl.program_id(0) % parts * COLUMNS + tl.arange(0, COLUMNS)
    # Transposed, so that the state, and what corrects it, go from one product to the next in registers.
    state_at = states_ptr + head * (KEY_DIM * VALUE_DIM) + d[None, :] * VALUE_DIM + j[:, None]
    state = tl.load(state_at + slot * state_stride)
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    k_column = KEYS + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + d
    for n in tl.range(0, chunks, num_stages=STAGES):
        chunk = (first + n).to(tl.int64)
        tile = chunk * VALUE_HEADS + head
        narrow = state.to(HALF)
        tl.store(before_ptr + tile * (KEY_DIM * VALUE_DIM) + j[:, None] * KEY_DIM + d[None, :], narrow)
        w = tl.load(w_ptr + tile * (TOKENS * KEY_DIM) + i[:, None] * KEY_DIM + d[None, :])
        u_at = u_ptr + tile * (VALUE_DIM * TOKENS) + j[:, None] * TOKENS + i[None, :]
        u = tl.load(u_at)
        fields = chunks_ptr + chunk * CHUNK_FIELDS
        t = tl.load(fields).to(tl.int64) + i
        k_at = x_ptr + t[:, None] * (2 * KEYS + VALUE_HEADS * VALUE_DIM) + k_column[None, :]
        k = tl.load(k_at, mask=(i < tl.load(fields + 1))[:, None], other=0.0)
        passed = tl.load(fields + 5).to(tl.int64)
        of_chunk = chunk * TOKENS * VALUE_HEADS + head
        tails = tl.load(tails_ptr + of_chunk + i * VALUE_HEADS)
        last = tl.exp(tl.load(sums_ptr + of_chunk + (TOKENS - 1) * VALUE_HEADS))
        new = u.to(tl.float32) - _dot(narrow, tl.trans(w), HALF)
        tl.store(u_at, new.to(u_ptr.dtype.element_ty))
        state = state * last + _dot(new * tails[None, :], k, HALF)
        if passed > 0:
            tl.store(state_at + passed * state_stride, state)
    if slot > 0:
        tl.store(state_at + slot * state_stride, state)


# ---------------------------------------------------------------- outputs


@triton.jit
def _outputs_kernel(
    x_ptr, z_ptr, norm_ptr, new_ptr, before_ptr, sums_ptr, chunks_ptr, out_ptr, eps, scale, z_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TOKENS: tl.constexpr, FIELDS: tl.constexpr, HALF: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    head = tl.program_id(0)
    number = tl.program_id(1).to(tl.int64)
    chunk = chunks_ptr + tl.program_id(1) * FIELDS
    token = tl.load(chunk).to(tl.int64) + tl.arange(0, TOKENS)
    i = tl.arange(0, TOKENS)
    inside = i < tl.load(chunk + 1)
    d = tl.arange(0, KEY_DIM)
    e = tl.arange(0, VALUE_DIM)
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    x_at = x_ptr + token[:, None] * (2 * KEYS + VALUE_HEADS * VALUE_DIM)
    q_at = x_at + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + d[None, :]
    q = tl.load(q_at, mask=inside[:, None], other=0.0)
    k = tl.load(q_at + KEYS, mask=inside[:, None], other=0.0)
    tile = number * VALUE_HEADS + head
    before = tl.load(before_ptr + tile * (KEY_DIM * VALUE_DIM) + e[:, None] * KEY_DIM + d[None, :])
    sums = tl.load(sums_ptr + (number * TOKENS + i) * VALUE_HEADS + head)
    wide = q.to(tl.float32)
    q_unit = tl.rsqrt(tl.sum(wide * wide, 1) + NORM_EPS) * scale
    wide = k.to(tl.float32)
    k_unit = tl.rsqrt(tl.sum(wide * wide, 1) + NORM_EPS)
    lower = i[:, None] >= i[None, :]
    between = tl.exp(tl.where(lower, sums[:, None] - sums[None, :], float("-inf")))
    scores = _dot(q, tl.trans(k), HALF) * between * q_unit[:, None] * k_unit[None, :]
    out = _dot(q, tl.trans(before), HALF) * (q_unit * tl.exp(sums))[:, None]
    new = tl.load(new_ptr + tile * (VALUE_DIM * TOKENS) + e[:, None] * TOKENS + i[None, :])
    out += _dot(scores, tl.trans(new), HALF)
    row = (token * VALUE_HEADS + head)[:, None] * VALUE_DIM + e[None, :]
    z = tl.load(z_ptr + token[:, None] * z_stride + head * VALUE_DIM + e[None, :], mask=inside[:, None], other=0.0)
    weight = tl.load(norm_ptr + e).to(tl.float32)[None, :]
    out = gated_norm(out, z.to(tl.float32), weight, eps, VALUE_DIM, x_ptr.dtype.element_ty)
    tl.store(out_ptr + row, out, mask=inside[:, None])


# ---------------------------------------------------------------- a layer


@dataclass(frozen=True, slots=True)
class Tiles:
    """Parameters that the kernels are compiled with."""

    within_warps: int = 4
    block: int = 16
    """Size of the diagonal blocks that are inverted on their own."""
    columns: int = 64
    """Columns of the state that a program takes from chunk to chunk: 16 for each warp."""
    warps: int = 4
    stages: int = 3
    output_warps: int = 4


@functools.cache
def best_tiles() -> Tiles:
    """As fast as was found (bench/delta.py --sweep), and with fewer stages where shared memory is small."""
    return Tiles() if room() > 130_000 else Tiles(stages=2)


def by_chunks(
    x: torch.Tensor, inputs: DeltaInputs, net: DeltaNet, states: LayerStates, lists: Cut, out: torch.Tensor,
    cache: KernelCache | None = None, tiles: Tiles | None = None,
) -> None:  # fmt: skip
    """What `delta.by_tokens` does, for the tokens of the chunks in `lists`."""
    spec, tiles = net.spec, tiles or best_tiles()
    number, heads = len(lists.chunks), spec.value_heads
    u, w = (x.new_empty((number, heads, TOKENS, width)) for width in (spec.value_dim, spec.key_dim))
    before = x.new_empty((number, heads, spec.value_dim, spec.key_dim))
    sums, tails = torch.empty((2, number, TOKENS, heads), dtype=torch.float32, device=x.device)
    half = TYPES[x.dtype]
    unit = tl.float32 if half == tl.float32 else tl.float16
    sizes = spec.key_heads, heads, spec.key_dim, spec.value_dim
    launch(
        _within_kernel, (heads, number, 1), cache,
        x, inputs.a, inputs.b, net.rates, net.dt_bias, lists.chunks, u, w, sums, tails, inputs.a.stride(0),
        inputs.b.stride(0), *sizes, spec.beta_factor, TOKENS, CHUNK_FIELDS, half, unit, tiles.block,
        num_warps=tiles.within_warps, num_stages=1,
    )  # fmt: skip
    columns = min(tiles.columns, spec.value_dim)
    launch(
        _across_kernel, (heads * spec.value_dim // columns, len(lists.sequences), 1), cache,
        x, w, sums, tails, lists.sequences, u, before, lists.chunks, states.rule, states.rule.stride(0), *sizes,
        columns, TOKENS, SEQUENCE_FIELDS, CHUNK_FIELDS, half, tiles.stages, num_warps=tiles.warps,
    )  # fmt: skip
    launch(
        _outputs_kernel, (heads, number, 1), cache,
        x, inputs.z, net.norm, u, before, sums, lists.chunks, out, net.eps, spec.key_dim**-0.5, inputs.z.stride(0),
        *sizes, TOKENS, CHUNK_FIELDS, half, num_warps=tiles.output_warps, num_stages=1,
    )  # fmt: skip
