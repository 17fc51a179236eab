"""Mamba-2's state-space models for chunks of tokens, by matrix products (arXiv 2405.21060, section 6).

With L the sums of the logarithms of a chunk's decays, dt its time steps, S the state before it, and rows for its
tokens:

    dt, L                                                                        _steps_kernel: all chunks at once
    S = exp(L_last) S + (dt exp(L_last - L) x)^T B                               _states_kernel: chunk after chunk
    y = exp(L) C S^T + (lower part of (C_i B_j) exp(L_i - L_j) dt_j) x + skip x  _mixed_kernel: all chunks at once

Heads of a group share C B^T. Products are bfloat16, sums and states float32.
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
from radixrt.worker.cuda.recurrent.cutting import CHUNK_FIELDS, SEQUENCE_FIELDS, Cut
from radixrt.worker.cuda.recurrent.delta import LayerStates
from radixrt.worker.cuda.recurrent.delta_chunks import TYPES, dot
from radixrt.worker.cuda.recurrent.mamba import MambaInputs, gate_alone, time_step

if TYPE_CHECKING:
    from radixrt.worker.model.layers.recurrent.mamba_mixer import Mamba
    from radixrt.worker.model.spec.mamba_spec import MambaSpec

HEADS_AT_ONCE = 16
"""Heads of a program of `_steps_kernel`."""
ELEMENTS = 16_384
"""The most elements of a state that a program of `_mixed_kernel` holds."""
FULL, FEW_COLUMNS = 128, 64
"""See `columns`."""
MIN_JOINED_CHUNKS = 2048
"""From so many pairs of a chunk and a head on, a program computes several heads of a chunk."""


@triton.jit
def _steps_kernel(
    raw_ptr, rates_ptr, bias_ptr, chunks_ptr, steps_ptr, sums_ptr, low, high, raw_stride, HEADS: tl.constexpr,
    TOKENS: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    head = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = head < HEADS
    chunk = chunks_ptr + tl.program_id(1) * FIELDS
    begin = tl.load(chunk).to(tl.int64)
    i = tl.arange(0, TOKENS)
    real = (i < tl.load(chunk + 1))[:, None] & there[None, :]
    at = raw_ptr + (begin + i)[:, None] * raw_stride + head[None, :]
    bias = tl.load(bias_ptr + head, mask=there, other=0.0)
    rate = tl.load(rates_ptr + head, mask=there, other=0.0)
    step = time_step(tl.load(at, mask=real, other=0.0).to(tl.float32), bias[None, :], low, high)
    step = tl.where(real, step, 0.0)
    sums = tl.cumsum(step * rate[None, :], 0)
    to = (tl.program_id(1).to(tl.int64) * HEADS + head)[None, :] * TOKENS + i[:, None]
    tl.store(steps_ptr + to, step, mask=there[None, :])
    tl.store(sums_ptr + to, sums, mask=there[None, :])


# ---------------------------------------------------------------- from chunk to chunk


@triton.jit
def _states_kernel(
    x_ptr, steps_ptr, sums_ptr, sequences_ptr, before_ptr, chunks_ptr, states_ptr, state_stride, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr, FIELDS: tl.constexpr, CHUNK_FIELDS: tl.constexpr, HALF: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    ACROSS: tl.constexpr = STATE // COLUMNS
    PARTS: tl.constexpr = DIM // ROWS * ACROSS
    head = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    sequence = sequences_ptr + tl.program_id(1) * FIELDS
    first = tl.load(sequence)
    chunks = tl.load(sequence + 1)
    slot = tl.load(sequence + 2).to(tl.int64)
    i = tl.arange(0, TOKENS)
    p = part // ACROSS * ROWS + tl.arange(0, ROWS)
    n = part % ACROSS * COLUMNS + tl.arange(0, COLUMNS)
    inner = p[:, None] * STATE + n[None, :]
    state_at = states_ptr + head * (DIM * STATE) + inner
    state = tl.load(state_at + slot * state_stride)
    VALUES: tl.constexpr = HEADS * DIM
    WIDTH: tl.constexpr = VALUES + 2 * GROUPS * STATE
    b_column = VALUES + head // (HEADS // GROUPS) * STATE + n
    for k in tl.range(0, chunks, num_stages=STAGES):
        tile = (first + k).to(tl.int64) * HEADS + head
        tl.store(before_ptr + tile * (DIM * STATE) + inner, state.to(HALF))
        step = tl.load(steps_ptr + tile * TOKENS + i)
        sums = tl.load(sums_ptr + tile * TOKENS + i)
        fields = chunks_ptr + (first + k) * CHUNK_FIELDS
        row = x_ptr + (tl.load(fields).to(tl.int64) + i)[:, None] * WIDTH
        inside = (i < tl.load(fields + 1))[:, None]
        passed = tl.load(fields + 5).to(tl.int64)
        x = tl.load(row + head * DIM + p[None, :], mask=inside, other=0.0)
        b = tl.load(row + b_column[None, :], mask=inside, other=0.0)
        last = tl.min(sums, 0)  # decays are at most 1
        x = x.to(tl.float32) * (step * tl.exp(last - sums))[:, None]
        state = state * tl.exp(last) + dot(tl.trans(x), b, HALF)
        if passed > 0:
            tl.store(state_at + passed * state_stride, state)
    if slot > 0:
        tl.store(state_at + slot * state_stride, state)


# ---------------------------------------------------------------- outputs


@triton.jit
def _mixed_kernel(
    x_ptr, z_ptr, skip_ptr, before_ptr, steps_ptr, sums_ptr, chunks_ptr, out_ptr, z_stride, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr,
    GATED: tl.constexpr, TOKENS: tl.constexpr, FIELDS: tl.constexpr, HALF: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    PARTS: tl.constexpr = DIM // ROWS
    first = tl.program_id(0) // PARTS * TOGETHER
    number = tl.program_id(1).to(tl.int64)
    chunk = chunks_ptr + tl.program_id(1) * FIELDS
    i = tl.arange(0, TOKENS)
    token = tl.load(chunk).to(tl.int64) + i
    inside = (i < tl.load(chunk + 1))[:, None]
    p = tl.program_id(0) % PARTS * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, STATE)
    VALUES: tl.constexpr = HEADS * DIM
    row = x_ptr + token[:, None] * (VALUES + 2 * GROUPS * STATE)
    b_at = row + VALUES + first // (HEADS // GROUPS) * STATE + n[None, :]
    b = tl.load(b_at, mask=inside, other=0.0)
    c = tl.load(b_at + GROUPS * STATE, mask=inside, other=0.0)
    alike = dot(c, tl.trans(b), HALF)
    lower = i[:, None] >= i[None, :]
    dtype = out_ptr.dtype.element_ty
    for k in tl.range(0, TOGETHER, num_stages=STAGES):
        head = first + k
        tile = number * HEADS + head
        step = tl.load(steps_ptr + tile * TOKENS + i)
        sums = tl.load(sums_ptr + tile * TOKENS + i)
        x = tl.load(row + head * DIM + p[None, :], mask=inside, other=0.0)
        before = tl.load(before_ptr + tile * (DIM * STATE) + p[:, None] * STATE + n[None, :])
        between = tl.exp(tl.where(lower, sums[:, None] - sums[None, :], float("-inf")))
        y = dot(c, tl.trans(before), HALF) * tl.exp(sums)[:, None]
        y += dot(alike * between * step[None, :], x, HALF)
        y += tl.load(skip_ptr + head) * x.to(tl.float32)
        if GATED:
            z_at = z_ptr + token[:, None] * z_stride + head * DIM + p[None, :]
            y = gate_alone(y, tl.load(z_at, mask=inside, other=0.0).to(tl.float32), dtype)
        to = out_ptr + token[:, None] * VALUES + head * DIM + p[None, :]
        tl.store(to, y.to(dtype), mask=inside)


# ---------------------------------------------------------------- a layer


@dataclass(frozen=True, slots=True)
class Tiles:
    """Parameters that the kernels are compiled with."""

    columns: int = 128
    """The most columns of a state that a program takes from chunk to chunk, of 64 rows."""
    warps: int = 4
    stages: int = 3
    together: int = 4
    """The most heads of a chunk that a program computes one after the other, if chunks are many."""
    mixed_warps: int = 4
    mixed_stages: int = 2


@functools.cache
def best_tiles() -> Tiles:
    """With fewer stages where shared memory is small. bench/mamba.py --sweep times others."""
    return Tiles() if room() > 130_000 else Tiles(stages=2, mixed_stages=1)


def columns(spec: MambaSpec, sequences: int, most: int) -> int:
    """Columns of a state that a program takes. If a step has one sequence, up to `most`, as long as FULL programs are
    left: x is then read once; otherwise up to FEW_COLUMNS."""
    blocks = spec.heads * max(1, spec.head_dim // 64)
    size = min(most, spec.state)
    while size > FEW_COLUMNS and (sequences > 1 or blocks * (spec.state // size) < FULL):
        size //= 2
    return size


def together(spec: MambaSpec, chunks: int, most: int) -> int:
    """Heads that a program computes, a power of two that divides those of a group."""
    heads = spec.heads // spec.groups
    return min(most, heads & -heads) if chunks * spec.heads >= MIN_JOINED_CHUNKS else 1


def by_chunks(
    x: torch.Tensor, inputs: MambaInputs, net: Mamba, states: LayerStates, lists: Cut, out: torch.Tensor,
    cache: KernelCache | None = None, tiles: Tiles | None = None,
) -> None:  # fmt: skip
    """What `mamba.by_tokens` does, for the tokens of the chunks in `lists`."""
    spec, tiles, tokens = net.spec, tiles or best_tiles(), lists.tokens
    number, heads = len(lists.chunks), spec.heads
    before = x.new_empty((number, heads, spec.head_dim, spec.state))
    steps, sums = torch.empty((2, number, heads, tokens), dtype=torch.float32, device=x.device)
    half = TYPES[x.dtype]
    launch(
        _steps_kernel, (triton.cdiv(heads, HEADS_AT_ONCE), number, 1), cache,
        inputs.steps, net.rates, net.step_bias, lists.chunks, steps, sums, *spec.limits, inputs.steps.stride(0), heads,
        tokens, CHUNK_FIELDS, HEADS_AT_ONCE, num_warps=4,
    )  # fmt: skip
    sizes = heads, spec.groups, spec.head_dim, spec.state
    rows, across = min(64, spec.head_dim), columns(spec, len(lists.sequences), tiles.columns)
    parts = (spec.head_dim // rows) * (spec.state // across)
    launch(
        _states_kernel, (heads * parts, len(lists.sequences), 1), cache,
        x, steps, sums, lists.sequences, before, lists.chunks, states.rule, states.rule.stride(0), *sizes, rows,
        across, tokens, SEQUENCE_FIELDS, CHUNK_FIELDS, half, tiles.stages, num_warps=tiles.warps,
    )  # fmt: skip
    each, rows = together(spec, number, tiles.together), min(spec.head_dim, max(1, ELEMENTS // spec.state))
    launch(
        _mixed_kernel, (heads // each * (spec.head_dim // rows), number, 1), cache,
        x, inputs.z, net.skip, before, steps, sums, lists.chunks, out, inputs.z.stride(0), *sizes, rows, each,
        net.norm is None, tokens, CHUNK_FIELDS, half, tiles.mixed_stages, num_warps=tiles.mixed_warps,
    )  # fmt: skip
