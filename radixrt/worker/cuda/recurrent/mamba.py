"""Mamba-2's state-space models (arXiv 2405.21060), token by token, and the gated norm of their results. `mamba_chunks`
computes chunks of many tokens, `convolutions` the short convolution before.

Per head, with the state S[P, N], and B and C of its group:

    S = exp(rate dt) S + (dt x) B^T,   y = S C + skip x,   dt = softplus(step + bias), limited

States are read from their slots and written back; those of drafted tokens, which follow another, only written (see
`cutting.Runs`). Slot 0 is that of padding: it is never written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.elementwise.launching import KernelCache, launch, wait
from radixrt.worker.cuda.recurrent.convolutions import silu
from radixrt.worker.cuda.recurrent.cutting import CHUNK_FIELDS, SEQUENCE_FIELDS, Cut, Runs, first_chunk, next_chunk
from radixrt.worker.cuda.recurrent.delta import LayerStates

if TYPE_CHECKING:
    from radixrt.worker.model.layers.recurrent.mamba_mixer import Mamba

DECODE_ELEMENTS, DECODE_WARPS = 8192, 8
"""The most elements of a state that a program of a decode holds, and its warps; bench/mamba.py --sweep times others."""
DECODE_REGISTERS = 168
"""The most registers of a thread of such a program, so that three programs fit on a multiprocessor of Hopper: without
the limit, the loop over a draft takes 236 for the same work."""
ROWS, WARPS = 8, 1
"""Rows of a state that a program of the loop over tokens holds, and its warps: sums of one need no barrier."""


@dataclass(frozen=True, slots=True)
class MambaInputs:
    """What a layer projects of T tokens, parts of its rows."""

    z: torch.Tensor
    """[T, H * P]: the gate of the result."""
    x: torch.Tensor
    """[T, channels]: x, B and C before the convolution."""
    steps: torch.Tensor
    """[T, H]: what time steps are made of."""

    @classmethod
    def of(cls, net: Mamba, projected: torch.Tensor) -> MambaInputs:
        """From the results of `Mamba.projection`."""
        return cls(*projected.split((net.spec.values, net.spec.channels, net.spec.heads), dim=1))


# ---------------------------------------------------------------- the update of a state


@triton.jit
def time_step(step, bias, low, high):
    """Time steps of what is projected, of float32 values: softplus, between `low` and `high`."""
    x = step + bias
    e = tl.exp(tl.minimum(x, 20.0))
    # Of 1 + e, little of a small e is left.
    log = tl.where(e < 0.01, e * (1 - e * (0.5 - e / 3)), tl.log(1 + e))
    return tl.minimum(tl.maximum(tl.where(x > 20, x, log), low), high)


@triton.jit
def _updated(state, x, b, c, step, rate, skip):
    """(The state [R, N] after a token, its output [R])."""
    state = state * tl.exp(step * rate) + (step * x)[:, None] * b[None, :]
    return state, tl.sum(state * c[None, :], 1) + skip * x


@triton.jit
def gate_alone(y, z, dtype: tl.constexpr):
    """float32 y, rounded to `dtype` first, times the SiLU of z."""
    return y.to(dtype).to(tl.float32) * silu(z)


@triton.jit
def _state_decode_kernel(
    x_ptr, z_ptr, steps_ptr, rates_ptr, bias_ptr, skip_ptr, slots_ptr, runs_ptr, states_ptr, out_ptr, low, high,
    z_stride, steps_stride, state_stride, HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr,
    STATE: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = DIM // ROWS
    head = tl.program_id(0) // PARTS
    token = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) % PARTS * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, STATE)
    # Only this kernel writes states, and copies before the step: so they can be read while the kernel before runs.
    run = tl.load(runs_ptr + token)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    at = states_ptr + head * (DIM * STATE) + i[:, None] * STATE + n[None, :]
    begins = i[:, None] < tl.where(run > 0, DIM, 0)
    state = tl.load(at + slot * state_stride, mask=begins, other=0.0, cache_modifier=".cg")
    wait(EARLY)
    VALUES: tl.constexpr = HEADS * DIM
    rate, bias, skip = tl.load(rates_ptr + head), tl.load(bias_ptr + head), tl.load(skip_ptr + head)
    dtype = out_ptr.dtype.element_ty
    for _ in range(run):
        x_at = x_ptr + token * (VALUES + 2 * GROUPS * STATE)
        b_at = x_at + VALUES + head // (HEADS // GROUPS) * STATE + n
        x = tl.load(x_at + head * DIM + i).to(tl.float32)
        b = tl.load(b_at).to(tl.float32)
        c = tl.load(b_at + GROUPS * STATE).to(tl.float32)
        raw = tl.load(steps_ptr + token * steps_stride + head).to(tl.float32)
        slot = tl.load(slots_ptr + token).to(tl.int64)
        state, y = _updated(state, x, b, c, time_step(raw, bias, low, high), rate, skip)
        if slot > 0:
            tl.store(at + slot * state_stride, state)
        if GATED:
            y = gate_alone(y, tl.load(z_ptr + token * z_stride + head * DIM + i).to(tl.float32), dtype)
        tl.store(out_ptr + token * VALUES + head * DIM + i, y.to(dtype))
        token += 1


def decode(
    x: torch.Tensor, inputs: MambaInputs, net: Mamba, states: LayerStates, runs: Runs, out: torch.Tensor,
    cache: KernelCache | None = None, elements: int = DECODE_ELEMENTS, warps: int = DECODE_WARPS,
) -> None:  # fmt: skip
    """Write a layer's results to out[T, H * P], for the tokens of `runs`: the first ones of `inputs` and of the
    convolution's results x. `finish` is to follow. A token's result is the same bit by bit, drafted or not."""
    spec = net.spec
    rows = min(spec.head_dim, max(1, elements // spec.state))
    launch(
        _state_decode_kernel, (spec.heads * spec.head_dim // rows, len(runs.slots), 1), cache,
        x, inputs.z, inputs.steps, net.rates, net.step_bias, net.skip, runs.slots, runs.lengths, states.rule, out,
        *spec.limits, inputs.z.stride(0), inputs.steps.stride(0), states.rule.stride(0), spec.heads, spec.groups,
        spec.head_dim, spec.state, rows, net.norm is None, num_warps=warps, maxnreg=DECODE_REGISTERS,
    )  # fmt: skip


# ---------------------------------------------------------------- token by token, for any number of tokens


@triton.jit
def _state_tokens_kernel(
    x_ptr, z_ptr, steps_ptr, rates_ptr, bias_ptr, skip_ptr, chunks_ptr, sequences_ptr, states_ptr, out_ptr, low, high,
    z_stride, steps_stride, state_stride, HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr,
    STATE: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr, FIELDS: tl.constexpr, CHUNK_FIELDS: tl.constexpr,
    RUNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    PARTS: tl.constexpr = DIM // ROWS
    head = tl.program_id(0) // PARTS
    begin, end, slot, chunk, stop = first_chunk(chunks_ptr, sequences_ptr, tl.program_id(1), FIELDS, CHUNK_FIELDS, RUNS)
    i = tl.program_id(0) % PARTS * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, STATE)
    state_at = states_ptr + head * (DIM * STATE) + i[:, None] * STATE + n[None, :]
    there = i < tl.where(end > begin, DIM, 0)
    state = tl.load(state_at + slot * state_stride, mask=there[:, None], other=0.0)
    rate, bias, skip = tl.load(rates_ptr + head), tl.load(bias_ptr + head), tl.load(skip_ptr + head)
    dtype = out_ptr.dtype.element_ty
    VALUES: tl.constexpr = HEADS * DIM
    WIDTH: tl.constexpr = VALUES + 2 * GROUPS * STATE
    token = begin.to(tl.int64)
    x_at = x_ptr + token * WIDTH + head * DIM + i
    b_at = x_ptr + token * WIDTH + VALUES + head // (HEADS // GROUPS) * STATE + n
    z_at = z_ptr + token * z_stride + head * DIM + i
    step_at = steps_ptr + token * steps_stride + head
    out_at = out_ptr + token * VALUES + head * DIM + i
    x, b, c = tl.load(x_at), tl.load(b_at), tl.load(b_at + GROUPS * STATE)
    raw = tl.load(step_at)
    for t in range(begin, end):
        # The next token is loaded while this one is computed.
        more = tl.where(t + 1 < end, 1, 0)
        x_at += more * WIDTH
        b_at += more * WIDTH
        step_at += more * steps_stride
        next_x, next_b, next_c = tl.load(x_at), tl.load(b_at), tl.load(b_at + GROUPS * STATE)
        next_raw = tl.load(step_at)
        step = time_step(raw.to(tl.float32), bias, low, high)
        state, y = _updated(state, x.to(tl.float32), b.to(tl.float32), c.to(tl.float32), step, rate, skip)
        if GATED:
            y = gate_alone(y, tl.load(z_at).to(tl.float32), dtype)
            z_at += z_stride
        tl.store(out_at, y.to(dtype))
        out_at += VALUES
        x, b, c, raw = next_x, next_b, next_c, next_raw
        if t + 1 == stop:
            passed, chunk, stop = next_chunk(chunk, stop, t + 1 < end, CHUNK_FIELDS, RUNS)
            if passed > 0:
                tl.store(state_at + passed * state_stride, state)
    if not RUNS:
        if slot > 0:
            tl.store(state_at + slot * state_stride, state)


def by_tokens(
    x: torch.Tensor, inputs: MambaInputs, net: Mamba, states: LayerStates, lists: Cut | Runs, out: torch.Tensor,
    cache: KernelCache | None = None,
) -> None:  # fmt: skip
    """What `decode` does, for the tokens of the chunks or runs in `lists`. A token's result is the same bit by bit,
    wherever its sequence is cut."""
    spec = net.spec
    chunks, sequences = lists.pair
    rows = min(ROWS, spec.head_dim)
    launch(
        _state_tokens_kernel, (spec.heads * spec.head_dim // rows, len(sequences), 1), cache,
        x, inputs.z, inputs.steps, net.rates, net.step_bias, net.skip, chunks, sequences, states.rule, out,
        *spec.limits, inputs.z.stride(0), inputs.steps.stride(0), states.rule.stride(0), spec.heads, spec.groups,
        spec.head_dim, spec.state, rows, net.norm is None, SEQUENCE_FIELDS, CHUNK_FIELDS, isinstance(lists, Runs),
        num_warps=WARPS,
    )  # fmt: skip


# ---------------------------------------------------------------- the norm of groups


@triton.jit
def _mean_squares_kernel(
    y_ptr, z_ptr, means_ptr, z_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, NORM_FIRST: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    inside = i < SIZE
    token = tl.program_id(0).to(tl.int64)
    wait(EARLY)
    y = tl.load(y_ptr + token * SIZE + i, mask=inside, other=0.0).to(tl.float32)
    if not NORM_FIRST:
        y = y * silu(tl.load(z_ptr + token * z_stride + i, mask=inside, other=0.0).to(tl.float32))
    tl.store(means_ptr + token, tl.sum(y * y, 0) / SIZE)


@triton.jit
def _group_norm_kernel(
    y_ptr, z_ptr, norm_ptr, means_ptr, eps, z_stride, means_stride, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, NORM_FIRST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    inside = i < SIZE
    column = tl.program_id(0) * SIZE + i
    token = tl.program_id(1).to(tl.int64)
    wait(EARLY)
    weight = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    at = y_ptr + token * (GROUPS * SIZE) + column
    y = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    gate = silu(tl.load(z_ptr + token * z_stride + column, mask=inside, other=0.0).to(tl.float32))
    if not NORM_FIRST:
        y = y * gate
    if RANKS > 1:
        mean = tl.load(means_ptr + token * means_stride)
        for rank in tl.static_range(1, RANKS):
            mean += tl.load(means_ptr + token * means_stride + rank)
        mean = mean / RANKS
    else:
        mean = tl.sum(y * y, 0) / SIZE
    y = weight * (y * tl.rsqrt(mean + eps))
    if NORM_FIRST:
        y = y * gate
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=inside)


def finish(inputs: MambaInputs, net: Mamba, out: torch.Tensor, cache: KernelCache | None = None) -> None:
    """Gate and normalize a layer's results out[T, H * P] in place (see `layers.recurrent.mamba.gated`). Where there is
    no norm, they have been gated already. Where ranks share a group of heads, a collective."""
    if net.norm is None:
        return
    spec, z = net.spec, inputs.z
    size, norm_first, ranks = spec.values // spec.groups, spec.norm == "before_gate", spec.group_ranks
    block = triton.next_power_of_2(size)
    warps, means = max(1, min(8, block // 512)), z
    if ranks > 1:
        mine = torch.empty((len(out), 1), dtype=torch.float32, device=out.device)
        launch(
            _mean_squares_kernel, (len(out), 1, 1), cache,
            out, z, mine, z.stride(0), size, block, norm_first, num_warps=warps,
        )  # fmt: skip
        means = net.over_ranks(mine)
    launch(
        _group_norm_kernel, (spec.groups, len(out), 1), cache,
        out, z, net.norm, means, net.eps, z.stride(0), means.stride(0), spec.groups, size, ranks, block, norm_first,
        num_warps=warps,
    )  # fmt: skip
