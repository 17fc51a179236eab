"""Short causal convolutions of each channel over the tokens of sequences, whose last inputs are their states. With SiLU
before linear attention; without it in layers of convolutions alone (ShortConv)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.cutting import CHUNK_FIELDS, TOKENS
from radixrt.worker.cuda.launching import KernelCache, launch, wait
from radixrt.worker.model.short_conv import ShortConv

if TYPE_CHECKING:
    from radixrt.worker.model.delta_net import DeltaNet

STEP_CHANNELS = 1024
"""Channels of a program for one token of each sequence."""
ROWS, CHANNELS = 8, 256
"""Tokens and channels of a program for a part of a chunk."""


@triton.jit
def silu(x):
    return x / (1 + tl.exp(-x))


@triton.jit
def _conv_kernel(
    x_ptr, weight_ptr, bias_ptr, slots_ptr, states_ptr, out_ptr, channels, x_stride, state_stride, K: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    token = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = c < channels
    slot = tl.load(slots_ptr + token).to(tl.int64)
    at = states_ptr + slot * state_stride + c * (K - 1)
    kept = c < tl.where(slot > 0, channels, 0)
    x = tl.load(x_ptr + token * x_stride + c, mask=inside, other=0.0)
    acc = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(K - 1):
        before = tl.load(at + j, mask=inside, other=0.0)
        acc += before.to(tl.float32) * tl.load(weight_ptr + c * K + j, mask=inside, other=0.0).to(tl.float32)
        if j > 0:
            tl.store(at + j - 1, before, mask=kept)
    tl.store(at + K - 2, x, mask=kept)
    acc += x.to(tl.float32) * tl.load(weight_ptr + c * K + K - 1, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        acc += tl.load(bias_ptr + c, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        acc = silu(acc)
    tl.store(out_ptr + token * channels + c, acc.to(out_ptr.dtype.element_ty), mask=inside)


def conv_step(
    x: torch.Tensor, net: DeltaNet | ShortConv, states: torch.Tensor, slots: torch.Tensor, out: torch.Tensor,
    cache: KernelCache | None = None,
) -> None:  # fmt: skip
    """Write the causal convolution of each channel of x[T, channels] to `out`, for one token of each of B sequences,
    the first B; and SiLU, but not of a ShortConv. `states` (`LayerStates.conv`) at integer slots[B] are updated."""
    channels, bias = x.shape[1], net.bias if isinstance(net, ShortConv) else None
    block = min(STEP_CHANNELS, triton.next_power_of_2(channels))
    launch(
        _conv_kernel, (triton.cdiv(channels, block), len(slots), 1), cache,
        x, net.conv, net.conv if bias is None else bias, slots, states, out, channels, x.stride(0), states.stride(0),
        net.conv.shape[1], bias is not None, not isinstance(net, ShortConv), block, num_warps=4,
    )  # fmt: skip


# ---------------------------------------------------------------- chunks


@triton.jit
def _conv_chunk_kernel(
    x_ptr, weight_ptr, bias_ptr, chunks_ptr, states_ptr, out_ptr, channels, x_stride, state_stride, K: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr,
    WHOLE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    chunk = chunks_ptr + tl.program_id(1) * FIELDS
    start, count = tl.load(chunk), tl.load(chunk + 1)
    slot = tl.load(chunk + 2).to(tl.int64)
    first, end = tl.load(chunk + 3), tl.load(chunk + 4)
    stored = tl.load(chunk + 5).to(tl.int64)
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
        kept = c < tl.where(slot > 0, channels, 0)
        for j in tl.static_range(K - 1):
            last = end - (K - 1 - j)
            if last >= first:
                tl.store(state_at + j, tl.load(x_ptr + last.to(tl.int64) * x_stride + c, mask=kept), mask=kept)
            else:
                tl.store(state_at + j, tl.load(state_at + (last - first + K - 1), mask=kept), mask=kept)
    if (stored > 0) & (begin == start):  # the inputs are all of this step (see `branching.NEAR`)
        for j in tl.static_range(K - 1):
            last = start + count - (K - 1 - j)
            late = tl.load(x_ptr + last.to(tl.int64) * x_stride + c, mask=real)
            tl.store(states_ptr + stored * state_stride + c * (K - 1) + j, late, mask=real)


def conv_chunks(
    x: torch.Tensor, net: DeltaNet | ShortConv, states: torch.Tensor, chunks: torch.Tensor, out: torch.Tensor,
    cache: KernelCache | None = None, whole: bool = False,
) -> None:  # fmt: skip
    """As `conv_step`, for the tokens of `chunks` (see `cutting`). `whole`: `out` is [chunks, TOKENS, channels], with
    zeros for tokens that a chunk lacks."""
    channels, bias = x.shape[1], net.bias if isinstance(net, ShortConv) else None
    launch(
        _conv_chunk_kernel, (triton.cdiv(channels, CHANNELS), len(chunks), TOKENS // ROWS), cache,
        x, net.conv, net.conv if bias is None else bias, chunks, states, out, channels, x.stride(0), states.stride(0),
        net.conv.shape[1], bias is not None, not isinstance(net, ShortConv), ROWS, CHANNELS, CHUNK_FIELDS, whole,
        num_warps=4,
    )  # fmt: skip
