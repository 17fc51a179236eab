"""Short causal convolutions of each channel over the tokens of sequences, whose last inputs are their states. With SiLU
before linear attention and in Mamba-2 mixers; without it in layers of convolutions alone (ShortConv)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.elementwise.launching import KernelCache, launch, wait
from radixrt.worker.cuda.recurrent.cutting import CHUNK_FIELDS, Cut, Runs
from radixrt.worker.model.layers.recurrent.mamba_mixer import Mamba
from radixrt.worker.model.layers.recurrent.short_conv import ShortConv

if TYPE_CHECKING:
    from radixrt.worker.model.layers.recurrent.delta_net import DeltaNet

STEP_CHANNELS = 1024
"""Channels of a program for one token of each sequence, or for a draft."""
STEP_REGISTERS = 128
"""The most registers of a thread of such a program, so that four programs fit on a multiprocessor of Hopper: without
the limit, the loop over a draft takes 142 for the same work."""
CHANNELS = 512
"""Channels of a program for a chunk. It computes all tokens of a chunk, one after the other or, in steps of less than
MAX_SPLIT_CHUNKS chunks, ROWS tokens at once."""
MAX_SPLIT_CHUNKS, ROWS = 32, 4


@triton.jit
def silu(x):
    return x / (1 + tl.exp(-x))


@triton.jit
def _tap(weight_ptr, c, channels, tap: tl.constexpr, K: tl.constexpr):
    """The weights of one of the last 4 inputs, 0 if the convolution does not see it."""
    TAP: tl.constexpr = tap - (4 - K)
    if TAP < 0:
        return tl.zeros(c.shape, tl.float32)
    else:
        return tl.load(weight_ptr + c * K + TAP, mask=c < channels, other=0.0).to(tl.float32)


@triton.jit
def _stored_input(at, back: tl.constexpr, inside, K: tl.constexpr):
    """The input `back` tokens before the next one, from a state; 0 if the convolution does not see it."""
    if back > K - 1:
        return tl.zeros(inside.shape, at.dtype.element_ty)
    else:
        return tl.load(at + (K - 1 - back), mask=inside, other=0.0)


@triton.jit
def _conv_kernel(
    x_ptr, weight_ptr, bias_ptr, slots_ptr, runs_ptr, states_ptr, out_ptr, channels, x_stride, state_stride,
    K: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    token = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    run = tl.load(runs_ptr + token)
    inside = c < tl.where(run > 0, channels, 0)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    state_at = states_ptr + c * (K - 1)
    x1 = _stored_input(state_at + slot * state_stride, 1, inside, K)
    x2 = _stored_input(state_at + slot * state_stride, 2, inside, K)
    x3 = _stored_input(state_at + slot * state_stride, 3, inside, K)
    w0 = _tap(weight_ptr, c, channels, 0, K)
    w1 = _tap(weight_ptr, c, channels, 1, K)
    w2 = _tap(weight_ptr, c, channels, 2, K)
    w3 = _tap(weight_ptr, c, channels, 3, K)
    x_at = x_ptr + token * x_stride + c
    x = tl.load(x_at, mask=inside, other=0.0)
    for t in range(run):
        # The next token's is loaded while this one is computed.
        x_at += x_stride
        more = c < tl.where(t + 1 < run, channels, 0)
        next_x = tl.load(x_at, mask=more, other=0.0)
        slot = tl.load(slots_ptr + token + t).to(tl.int64)
        kept = c < tl.where(slot > 0, channels, 0)
        acc = x3.to(tl.float32) * w0 + x2.to(tl.float32) * w1 + x1.to(tl.float32) * w2 + x.to(tl.float32) * w3
        if BIAS:
            acc += tl.load(bias_ptr + c, mask=inside, other=0.0).to(tl.float32)
        if SILU:
            acc = silu(acc)
        tl.store(out_ptr + (token + t) * channels + c, acc.to(out_ptr.dtype.element_ty), mask=inside)
        at = state_at + slot * state_stride + K - 2
        tl.store(at, x, mask=kept)
        if K > 2:
            tl.store(at - 1, x1, mask=kept)
        if K > 3:
            tl.store(at - 2, x2, mask=kept)
        x1, x2, x3 = x, x1, x2
        x = next_x


def _bias(net: DeltaNet | ShortConv | Mamba) -> torch.Tensor | None:
    """[channels], of the convolution."""
    return net.bias if isinstance(net, ShortConv) else net.conv_bias if isinstance(net, Mamba) else None


def conv_step(
    x: torch.Tensor, net: DeltaNet | ShortConv | Mamba, states: torch.Tensor, runs: Runs, out: torch.Tensor,
    cache: KernelCache | None = None,
) -> None:  # fmt: skip
    """Write the causal convolution of each channel of x[T, channels] to `out`, for the tokens of `runs`, the first
    ones; and SiLU, but not of a ShortConv. `states` (`LayerStates.conv`) are updated."""
    channels, bias = x.shape[1], _bias(net)
    block = min(STEP_CHANNELS, triton.next_power_of_2(channels))
    launch(
        _conv_kernel, (triton.cdiv(channels, block), len(runs.slots), 1), cache,
        x, net.conv, net.conv if bias is None else bias, runs.slots, runs.lengths, states, out, channels, x.stride(0),
        states.stride(0), net.conv.shape[1], bias is not None, not isinstance(net, ShortConv), block, num_warps=4,
        maxnreg=STEP_REGISTERS,
    )  # fmt: skip


# ---------------------------------------------------------------- chunks


@triton.jit
def _keep(x_ptr, state_at, c, channels, x_stride, slot, first, end, K: tl.constexpr):
    """Write a sequence's last inputs to its state."""
    kept = c < tl.where(slot > 0, channels, 0)
    for j in tl.static_range(K - 1):
        last = end - (K - 1 - j)
        if last >= first:
            tl.store(state_at + j, tl.load(x_ptr + last.to(tl.int64) * x_stride + c, mask=kept), mask=kept)
        else:
            tl.store(state_at + j, tl.load(state_at + (last - first + K - 1), mask=kept), mask=kept)


@triton.jit
def _store(x_ptr, states_ptr, chunk, c, channels, x_stride, state_stride, stop, K: tl.constexpr):
    """If a state is to be stored after a chunk, which ends at `stop`: write its last inputs. All are of this step
    (see `state_checkpoints.NEAR`)."""
    slot = tl.load(chunk + 5).to(tl.int64)
    if slot > 0:
        for j in tl.static_range(K - 1):
            x = tl.load(x_ptr + (stop - (K - 1 - j)).to(tl.int64) * x_stride + c, mask=c < channels)
            tl.store(states_ptr + slot * state_stride + c * (K - 1) + j, x, mask=c < channels)


@triton.jit
def _earlier(x_at, state_at, back: tl.constexpr, c, channels, x_stride, is_first, K: tl.constexpr):
    """The inputs `back` tokens before a chunk, from the state if the chunk is its sequence's first."""
    if back > K - 1:
        return tl.zeros(c.shape, tl.float32)
    else:
        if is_first:
            x = tl.load(state_at + (K - 1 - back), mask=c < channels, other=0.0)
        else:
            x = tl.load(x_at - back * x_stride, mask=c < channels, other=0.0)
        return x.to(tl.float32)


@triton.jit
def _weighted(w0, w1, w2, w3, bias, x0, x1, x2, x3, SILU: tl.constexpr):
    acc = x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3 + bias
    if SILU:
        acc = silu(acc)
    return acc


@triton.jit
def _conv_chunk_kernel(
    x_ptr, weight_ptr, bias_ptr, chunks_ptr, states_ptr, out_ptr, channels, x_stride, state_stride, K: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr,
    WHOLE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    chunk = chunks_ptr + tl.program_id(1) * FIELDS
    begin, count = tl.load(chunk), tl.load(chunk + 1)
    slot = tl.load(chunk + 2).to(tl.int64)
    first, end = tl.load(chunk + 3), tl.load(chunk + 4)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w0 = _tap(weight_ptr, c, channels, 0, K)
    w1 = _tap(weight_ptr, c, channels, 1, K)
    w2 = _tap(weight_ptr, c, channels, 2, K)
    w3 = _tap(weight_ptr, c, channels, 3, K)
    if BIAS:
        bias = tl.load(bias_ptr + c, mask=c < channels, other=0.0).to(tl.float32)
    else:
        bias = 0.0
    x_at = x_ptr + begin.to(tl.int64) * x_stride + c
    row = begin.to(tl.int64)
    stop = count
    if WHOLE:
        row = tl.program_id(1).to(tl.int64) * TOKENS
        stop = TOKENS
    out_at = out_ptr + row * channels + c
    state_at = states_ptr + slot * state_stride + c * (K - 1)
    x0 = _earlier(x_at, state_at, 3, c, channels, x_stride, begin == first, K)
    x1 = _earlier(x_at, state_at, 2, c, channels, x_stride, begin == first, K)
    x2 = _earlier(x_at, state_at, 1, c, channels, x_stride, begin == first, K)
    dtype = out_ptr.dtype.element_ty
    for t in range(0, stop, 4):  # four loads at once
        room = stop - t
        left = count - t
        y0 = tl.load(x_at, mask=c < tl.where(left > 0, channels, 0), other=0.0).to(tl.float32)
        y1 = tl.load(x_at + x_stride, mask=c < tl.where(left > 1, channels, 0), other=0.0).to(tl.float32)
        y2 = tl.load(x_at + 2 * x_stride, mask=c < tl.where(left > 2, channels, 0), other=0.0).to(tl.float32)
        y3 = tl.load(x_at + 3 * x_stride, mask=c < tl.where(left > 3, channels, 0), other=0.0).to(tl.float32)
        out = tl.where(left > 0, _weighted(w0, w1, w2, w3, bias, x0, x1, x2, y0, SILU), 0.0)
        tl.store(out_at, out.to(dtype), mask=c < channels)
        out = tl.where(left > 1, _weighted(w0, w1, w2, w3, bias, x1, x2, y0, y1, SILU), 0.0)
        tl.store(out_at + channels, out.to(dtype), mask=c < tl.where(room > 1, channels, 0))
        out = tl.where(left > 2, _weighted(w0, w1, w2, w3, bias, x2, y0, y1, y2, SILU), 0.0)
        tl.store(out_at + 2 * channels, out.to(dtype), mask=c < tl.where(room > 2, channels, 0))
        out = tl.where(left > 3, _weighted(w0, w1, w2, w3, bias, y0, y1, y2, y3, SILU), 0.0)
        tl.store(out_at + 3 * channels, out.to(dtype), mask=c < tl.where(room > 3, channels, 0))
        x0, x1, x2 = y1, y2, y3
        x_at += 4 * x_stride
        out_at += 4 * channels
    if begin == first:  # the only program that reads the old inputs writes the new ones, each thread those it read
        _keep(x_ptr, state_at, c, channels, x_stride, slot, first, end, K)
    _store(x_ptr, states_ptr, chunk, c, channels, x_stride, state_stride, begin + count, K)


@triton.jit
def _conv_part_kernel(
    x_ptr, weight_ptr, bias_ptr, chunks_ptr, states_ptr, out_ptr, channels, x_stride, state_stride, K: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr,
    WHOLE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    chunk = chunks_ptr + tl.program_id(1) * FIELDS
    start, count = tl.load(chunk), tl.load(chunk + 1)
    slot = tl.load(chunk + 2).to(tl.int64)
    first, end = tl.load(chunk + 3), tl.load(chunk + 4)
    begin = start + tl.program_id(2) * ROWS
    if not WHOLE and begin >= start + count:
        return
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = c < channels
    t = begin + tl.arange(0, ROWS)[:, None]
    inside = (t < start + count) & real[None, :]
    state_at = states_ptr + slot * state_stride + c * (K - 1)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for j in tl.static_range(K):  # each input is loaded K times, at once: the cache has it
        at = t - (K - 1 - j)
        x = tl.load(x_ptr + at.to(tl.int64) * x_stride + c[None, :], mask=inside & (at >= first), other=0.0)
        x = x.to(tl.float32)
        if (j < K - 1) & (begin == first):
            before = inside & (at < first)
            x += tl.load(state_at[None, :] + (K - 1 + at - first), mask=before, other=0.0).to(tl.float32)
        acc += x * tl.load(weight_ptr + c * K + j, mask=real, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + c, mask=real, other=0.0).to(tl.float32)[None, :]
    if SILU:
        acc = silu(acc)
    row = t.to(tl.int64)
    if WHOLE:
        row += tl.program_id(1).to(tl.int64) * (ROWS * tl.num_programs(2)) - start
        acc = tl.where(inside, acc, 0.0)
        inside = inside | real[None, :]
    tl.store(out_ptr + row * channels + c[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)
    if begin == first:  # the only program that reads the old inputs writes the new ones
        tl.debug_barrier()
        _keep(x_ptr, state_at, c, channels, x_stride, slot, first, end, K)
    if begin == start:
        _store(x_ptr, states_ptr, chunk, c, channels, x_stride, state_stride, start + count, K)


def conv_chunks(
    x: torch.Tensor, net: DeltaNet | ShortConv | Mamba, states: torch.Tensor, lists: Cut, out: torch.Tensor,
    cache: KernelCache | None = None, whole: bool = False,
) -> None:  # fmt: skip
    """As `conv_step`, for the tokens of the chunks in `lists`. `whole`: `out` is [chunks, lists.tokens, channels], with
    zeros for tokens that a chunk lacks."""
    channels, bias, chunks, tokens = x.shape[1], _bias(net), lists.chunks, lists.tokens
    given = x, net.conv, net.conv if bias is None else bias, chunks, states, out, channels, x.stride(0)
    kinds = states.stride(0), net.conv.shape[1], bias is not None, not isinstance(net, ShortConv)
    if len(chunks) < MAX_SPLIT_CHUNKS:
        grid = triton.cdiv(channels, CHANNELS), len(chunks), triton.cdiv(tokens, ROWS)
        launch(_conv_part_kernel, grid, cache, *given, *kinds, ROWS, CHANNELS, CHUNK_FIELDS, whole, num_warps=4)
    else:
        grid = triton.cdiv(channels, CHANNELS), len(chunks), 1
        launch(_conv_chunk_kernel, grid, cache, *given, *kinds, tokens, CHANNELS, CHUNK_FIELDS, whole, num_warps=2)
