"""Linear attention by the gated delta rule (arXiv 2412.06464), token by token: the update of a recurrent state, and
a gated norm. `delta_chunks` computes chunks of many tokens, `convolutions` the short convolution before.

Per head, with the state S[Dk, Dv], q and k of norm 1 (q also divided by the root of Dk):

    S = exp(decay) S,   S = S + k (beta (v - S^T k))^T,   out = S^T q
    decay = rate softplus(a + dt_bias),   beta = factor sigmoid(b)

States are read from their slots and written back; those of drafted tokens, which follow another, only written (see
`cutting.Runs`). Slot 0 is that of padding: it is never written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.elementwise.launching import KernelCache, launch, wait
from radixrt.worker.cuda.recurrent.convolutions import silu
from radixrt.worker.cuda.recurrent.cutting import CHUNK_FIELDS, SEQUENCE_FIELDS, Cut, Runs, first_chunk, next_chunk

if TYPE_CHECKING:
    from radixrt.worker.model.layers.recurrent.delta_net import DeltaNet
    from radixrt.worker.model.spec.delta_spec import DeltaSpec

NORM_EPS = tl.constexpr(1e-6)
"""Added to the sum of the squares of q and of k."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Columns of a head's state that a program of the loop over tokens holds, and its warps."""

    columns: int
    warps: int


SLIM = Tile(8, 1)
"""For long loops, and for all tokens where the bits of results must not depend on a batch: sums of one warp need no
barrier."""
DECODES = (4, Tile(16, 1)), (32, Tile(32, 2)), (1 << 30, Tile(64, 2))
"""For up to so many decoded and drafted tokens (bench/delta.py --sweep)."""
DECODE_KEYS = 128
"""The most keys of a head whose states these tiles hold in registers."""
MIN_LARGE_ROWS = 1 << 14
"""Heads of all tokens from which on a program normalizes more of them."""


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """What a layer projects of T tokens. Rows may be parts of longer ones."""

    x: torch.Tensor
    """[T, channels]: q, k and v before the convolution."""
    z: torch.Tensor
    """[T, Hv * Dv]: the gate of the result."""
    b: torch.Tensor
    """[T, Hv]."""
    a: torch.Tensor
    """[T, Hv], or [T, Hv * Dk] with a decay for each element of a key."""

    @classmethod
    def of(cls, net: DeltaNet, qkvz: torch.Tensor, ba: torch.Tensor) -> DeltaInputs:
        """From the results of `DeltaNet.qkvz` and `DeltaNet.ba`."""
        x, rest = qkvz.tensor_split((net.spec.channels,), dim=1)
        if net.ups is None:
            return cls(x, rest, *ba.chunk(2, dim=1))
        a, z = (up(part.contiguous()) for up, part in zip(net.ups, rest.chunk(2, dim=1), strict=True))
        return cls(x, z, ba, a)


@dataclass(frozen=True, slots=True)
class LayerStates:
    """One layer's part of the state pool, by slot."""

    conv: torch.Tensor
    """[slots, channels, K - 1]: the last inputs of the convolution, oldest first."""
    rule: torch.Tensor
    """float32 [slots, Hv, Dk, Dv]."""


# ---------------------------------------------------------------- the update of a state


@triton.jit
def decay_of(a, rate, dt_bias):
    """The natural logarithm of a token's decay, of float32 values."""
    x = a + dt_bias
    return rate * tl.where(x > 20, x, tl.log(1 + tl.exp(x)))


@triton.jit
def gated_norm(x, z, weight, eps, SIZE: tl.constexpr, dtype: tl.constexpr, SIGMOID: tl.constexpr = False):
    """RMSNorm of float32 x[..., SIZE], rounded to `dtype` first, times the weight and the SiLU or sigmoid of z."""
    x = x.to(dtype).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, len(x.shape) - 1, keep_dims=True) / SIZE + eps)
    gate = tl.sigmoid(z) if SIGMOID else silu(z)
    return (x * weight * gate).to(dtype)


@triton.jit
def _updated(state, q, k, v, kept, beta, scale):
    """(The state [Dk, N] after a token, its output [N]). q and k are as projected; `kept` is what is left of the state
    after its decay."""
    q = q * (tl.rsqrt(tl.sum(q * q, 0) + NORM_EPS) * scale)
    k = k * tl.rsqrt(tl.sum(k * k, 0) + NORM_EPS)
    state = state * kept
    # The output follows from sums over the state before its update, so that there is one pass over it.
    known = tl.sum(state * k[:, None], 0)
    out = tl.sum(state * q[:, None], 0)
    new = (v - known) * beta
    return state + k[:, None] * new[None, :], out + tl.sum(q * k, 0) * new


# ---------------------------------------------------------------- token by token


@triton.jit
def _tokens_kernel(
    x_ptr, a_ptr, b_ptr, rates_ptr, dt_bias_ptr, chunks_ptr, sequences_ptr, states_ptr, out_ptr, scale, a_stride,
    b_stride, state_stride, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, FACTOR: tl.constexpr, EACH: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    FIELDS: tl.constexpr, CHUNK_FIELDS: tl.constexpr, RUNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    parts: tl.constexpr = VALUE_DIM // COLUMNS
    head = tl.program_id(0) // parts
    begin, end, slot, chunk, stop = first_chunk(chunks_ptr, sequences_ptr, tl.program_id(1), FIELDS, CHUNK_FIELDS, RUNS)
    i = tl.arange(0, KEYS)
    real = i < KEY_DIM
    j = tl.program_id(0) % parts * COLUMNS + tl.arange(0, COLUMNS)
    state_at = states_ptr + head * (KEY_DIM * VALUE_DIM) + i[:, None] * VALUE_DIM + j[None, :]
    there = i < tl.where(end > begin, KEY_DIM, 0)
    state = tl.load(state_at + slot * state_stride, mask=there[:, None], other=0.0)
    rate = tl.load(rates_ptr + head)
    dtype = x_ptr.dtype.element_ty
    ALL: tl.constexpr = KEY_HEADS * KEY_DIM
    WIDTH: tl.constexpr = 2 * ALL + VALUE_HEADS * VALUE_DIM
    token = begin.to(tl.int64)
    q_at = x_ptr + token * WIDTH + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + i
    v_at = x_ptr + token * WIDTH + 2 * ALL + head * VALUE_DIM + j
    b_at = b_ptr + token * b_stride + head
    out_at = out_ptr + (token * VALUE_HEADS + head) * VALUE_DIM + j
    if EACH:  # a decay for each element of a key
        of_a = head * KEY_DIM + i
        dt_bias = tl.load(dt_bias_ptr + of_a, mask=real, other=0.0)
    else:
        of_a = head + i * 0
        dt_bias = tl.load(dt_bias_ptr + of_a)
    a_at = a_ptr + token * a_stride + of_a
    q, k = tl.load(q_at, mask=real, other=0.0), tl.load(q_at + ALL, mask=real, other=0.0)
    v, a, b = tl.load(v_at), tl.load(a_at, mask=real, other=0.0), tl.load(b_at)
    for t in range(begin, end):
        # The next token is loaded while this one is computed.
        more = tl.where(t + 1 < end, 1, 0)
        q_at += more * WIDTH
        v_at += more * WIDTH
        a_at += more * a_stride
        b_at += more * b_stride
        next_q, next_k = tl.load(q_at, mask=real, other=0.0), tl.load(q_at + ALL, mask=real, other=0.0)
        next_v, next_a, next_b = tl.load(v_at), tl.load(a_at, mask=real, other=0.0), tl.load(b_at)
        decay = tl.exp(decay_of(a.to(tl.float32), rate, dt_bias))[:, None]
        beta = FACTOR * tl.sigmoid(b.to(tl.float32))
        state, out = _updated(state, q.to(tl.float32), k.to(tl.float32), v.to(tl.float32), decay, beta, scale)
        tl.store(out_at, out.to(dtype))
        out_at += VALUE_HEADS * VALUE_DIM
        q, k, v, a, b = next_q, next_k, next_v, next_a, next_b
        if t + 1 == stop:
            passed, chunk, stop = next_chunk(chunk, stop, t + 1 < end, CHUNK_FIELDS, RUNS)
            if passed > 0:
                tl.store(state_at + passed * state_stride, state, mask=real[:, None])
    if not RUNS:
        if slot > 0:
            tl.store(state_at + slot * state_stride, state, mask=real[:, None])


@triton.jit
def _gated_norm_kernel(
    x_ptr, z_ptr, norm_ptr, rows, eps, z_stride, VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr,
    SIGMOID: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (j < VALUE_DIM)[None, :]
    at = x_ptr + row[:, None] * VALUE_DIM + j[None, :]
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    z_at = z_ptr + (row // VALUE_HEADS * z_stride + row % VALUE_HEADS * VALUE_DIM)[:, None] + j[None, :]
    z = tl.load(z_at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + j, mask=j < VALUE_DIM, other=0.0).to(tl.float32)[None, :]
    out = gated_norm(x, z, weight, eps, VALUE_DIM, x_ptr.dtype.element_ty, SIGMOID)
    tl.store(at, out, mask=inside)


def norm_and_gate(x: torch.Tensor, z: torch.Tensor, net: DeltaNet, cache: KernelCache | None) -> None:
    """The gated norm of each head of x[T, Hv, Dv], in place, by the gates z[T, Hv * Dv]."""
    spec, rows = net.spec, x.shape[0] * x.shape[1]
    each = 4 if rows <= MIN_LARGE_ROWS else 16
    launch(
        _gated_norm_kernel, (triton.cdiv(rows, each), 1, 1), cache,
        x, z, net.norm, rows, net.eps, z.stride(0), spec.value_heads, spec.value_dim, net.ups is not None, each,
        triton.next_power_of_2(spec.value_dim), num_warps=each // 4,
    )  # fmt: skip


def decode_tile(spec: DeltaSpec, tokens: int) -> Tile:
    """The tile for so many decoded and drafted tokens."""
    if spec.rank or spec.key_dim > DECODE_KEYS:  # not measured
        return SLIM
    tile = next(tile for most, tile in DECODES if tokens <= most)
    return Tile(math.gcd(tile.columns, spec.value_dim), tile.warps)


def by_tokens(
    x: torch.Tensor, inputs: DeltaInputs, net: DeltaNet, states: LayerStates, lists: Cut | Runs, out: torch.Tensor,
    cache: KernelCache | None = None, first: int = 0, tile: Tile = SLIM,
) -> None:  # fmt: skip
    """Write a layer's results, normalized and gated, to out[T, Hv, Dv], for the tokens of `inputs`, and of the
    convolution's results x, that are in the chunks or runs of `lists`. With the same tile, a token's result is the same
    bit by bit, drafted or not, and wherever its sequence is cut. Results of tokens before the `first` one stay."""
    spec = net.spec
    chunks, sequences = lists.pair
    columns = min(tile.columns, spec.value_dim)
    assert spec.value_dim % columns == 0, spec
    launch(
        _tokens_kernel, (spec.value_heads * spec.value_dim // columns, len(sequences), 1), cache,
        x, inputs.a, inputs.b, net.rates, net.dt_bias, chunks, sequences, states.rule, out,
        spec.key_dim**-0.5, inputs.a.stride(0), inputs.b.stride(0), states.rule.stride(0), spec.key_heads,
        spec.value_heads, spec.key_dim, spec.value_dim, spec.beta_factor, net.ups is not None,
        triton.next_power_of_2(spec.key_dim), columns, SEQUENCE_FIELDS, CHUNK_FIELDS, isinstance(lists, Runs),
        num_warps=tile.warps, num_stages=3,
    )  # fmt: skip
    norm_and_gate(out[first:], inputs.z[first:], net, cache)
