"""Linear attention by the gated delta rule (arXiv 2412.06464), and the short convolutions before it: the reference in
torch of what has kernels on a GPU.

Sequences are concatenated, and `bounds` are their cumulative counts: tokens bounds[b] to bounds[b + 1] are of sequence
b, whose state is at slots[b]. States are updated in place or, if given, written to the slots `to` instead, sequence
after sequence, so that one may go on from the state of another before it. Each sequence is computed on its own,
whatever else is in the step. Slot 0 is the null slot: several sequences may have it, and what is there has no meaning.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn import functional as F

from radixrt.worker.model.layers.moe import sigmoid

CHUNK = 64
"""Tokens that `_by_chunks` computes by matrix products."""
VECTOR = 64
"""Elementwise functions on a CPU compute rows of a multiple of this many elements in vectors alone (see `moe.sigmoid`).
"""
ROWS = 16
"""Tokens of a chunk whose products are computed one by one, if each element of the key has a decay of its own."""
EPS = 1e-6
"""Added to the squared length of keys and queries."""


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    slots: torch.Tensor,
    bounds: torch.Tensor,
    activation: str | None = "silu",
    to: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal convolution of each channel: [T, C] of x[T, C] with weight[C, K] and bias[C], then `activation`.

    `states` [S, C, K - 1], of the dtype of x and any strides between slots, have the last K - 1 inputs of a sequence,
    the oldest first. Sums are in float32, in the order of the weight, and rounded once. A token's result does not
    depend, to the last bit, on how its sequence is cut into steps."""
    parts, wide = [], weight.float()
    if len(x) == len(slots) and to is None:  # one token of each sequence
        inputs = torch.cat((states[slots], x[:, :, None]), dim=2)
        states[slots] = inputs[:, :, 1:]
        parts.append(_convolved(inputs.permute(2, 0, 1), wide)[0])
    else:
        targets = slots if to is None else to
        for slot, target, part in zip(slots.tolist(), targets.tolist(), _split(x, bounds), strict=True):
            inputs = torch.cat((states[slot].t(), part))
            states[target] = inputs[len(part) :].t()
            parts.append(_convolved(inputs, wide))
    out = torch.cat(parts)
    if bias is not None:
        out += bias.float()
    return (out if activation is None else activated(out, activation)).to(x.dtype)


def activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    """silu or sigmoid of float32 x[T, ...]. On a CPU too, an element's last bit does not depend on its place."""
    if x.is_cuda or x[:1].numel() % VECTOR == 0:
        return F.silu(x) if activation == "silu" else x.sigmoid()
    found = sigmoid(x)
    return x * found if activation == "silu" else found


def _convolved(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float32[T, ..., C] of inputs[T + K - 1, ..., C] and weight float32[C, K]."""
    inputs, count = inputs.float(), len(inputs) - weight.shape[1] + 1
    out = inputs[:count] * weight[:, 0]
    for tap in range(1, weight.shape[1]):
        out += inputs[tap : tap + count] * weight[:, tap]
    return out


def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    bounds: torch.Tensor,
    exact: bool = False,
    to: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gated delta rule: [T, Hv, Dv], of the dtype of v. For each token and head, with the state S [Dk, Dv]:

        S = exp(decay) S;   S = S + k (beta (v - S^T k))^T;   o = S^T q

    q, k [T, Hk, Dk] are normalized here, in float32: x / sqrt(|x|^2 + EPS), q then times Dk^-0.5. Each of their heads
    serves Hv / Hk consecutive heads of v [T, Hv, Dv]. `decay` float32[T, Hv], or [T, Hv, Dk] with one for each element
    of the key, is a natural logarithm, at most 0; beta [T, Hv] is any float. `states` float32[S, Hv, Dk, Dv] may have
    any strides between slots.

    Sequences of one token, and all if `exact`, are computed token by token: a token's result is then the same, to the
    last bit, however its sequence is cut. Longer sequences are computed in chunks of CHUNK tokens from their first one
    on, by matrix products: the same up to the rounding of float32, which depends on where they are cut.
    """
    kind = v.dtype
    q, k = (_repeated(_normalized(x), v.shape[1]) for x in (q, k))
    q, v, beta = q * q.shape[-1] ** -0.5, v.float(), beta.float()
    if decay.dim() == 2:
        decay = decay[..., None]
    parts = [_split(x, bounds) for x in (q, k, v, decay, beta)]
    out = []
    targets = slots if to is None else to
    for slot, target, *part in zip(slots.tolist(), targets.tolist(), *parts, strict=True):
        rule: Rule = _by_tokens if exact or len(part[0]) == 1 else in_order(_by_chunks, _by_tokens)
        outputs, states[target] = rule(*part, states[slot])
        out.append(outputs)
    return torch.cat(out).to(kind)


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, activation: str = "silu"
) -> torch.Tensor:
    """RMSNorm of each head of x[T, heads, D], times weight[D] and the activation (silu or sigmoid) of
    gate[T, heads, D], in float32."""
    wide, gate = x.float(), activated(gate.float(), activation)
    normed = weight.float() * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps))
    return (normed * gate).to(x.dtype)


def _split(x: torch.Tensor, bounds: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.split(bounds.diff().tolist())


def _normalized(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPS)


def _repeated(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


Rule = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""(the inputs of a sequence's tokens, its state) -> (output [T, heads, D], new state)."""


def in_order(by_chunks: Rule, by_tokens: Rule) -> Rule:
    """`by_chunks`; but on a CPU, if a result is not finite, `by_tokens`: in the products of a chunk, a token that is
    NaN reaches those before it, since 0 times NaN is NaN. On a GPU the host would wait."""

    def rule(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, state = by_chunks(*inputs)
        return (out, state) if out.is_cuda or math.isfinite(out.sum()) else by_tokens(*inputs)

    return rule


def _by_tokens(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence as it is written, of one sequence: (output [T, H, Dv], new state)."""
    # By float64, because on a CPU an element's last bit depends on its place (see `moe.sigmoid`).
    out, kept = torch.empty_like(v), decay.double().exp().float()[..., None]
    for token in range(len(q)):
        state = state * kept[token]
        key = k[token, :, :, None]
        recalled = (state * key).sum(1)
        state = state + key * ((v[token] - recalled) * beta[token, :, None])[:, None]
        out[token] = (state * q[token, :, :, None]).sum(1)
    return out, state


def _by_chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, chunk by chunk (arXiv 2412.06464, section 3.3). Within a chunk, with G the decays summed up to a token
    and S the state before it, the corrections U of all its tokens solve a triangular system:

        (I + L) U = beta (V - (K exp(G)) S),   L[i, j] = beta[i] k[i] . (exp(G[i] - G[j]) k[j]) for j < i
        O = (Q exp(G)) S + A U,                A[i, j] = q[i] . (exp(G[i] - G[j]) k[j]) for j <= i
        S = exp(G[last]) S + (K exp(G[last] - G))^T U
    """
    out = []
    heads = (x.transpose(0, 1).split(CHUNK, dim=1) for x in (q, k, v, decay, beta))
    for q, k, v, decay, beta in zip(*heads, strict=True):
        total = decay.double().cumsum(1)  # differences of large sums are taken
        last, fade, beta = total[:, -1:], total.float().exp(), beta[..., None]
        system, seen = _products(torch.stack((k * beta, q)), k, total)
        wanted = beta * (v - (k * fade) @ state)
        updates = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        out.append((q * fade) @ state + seen @ updates)
        kept, rest = last.float().exp(), (last - total).float().exp()
        state = kept.transpose(1, 2) * state + (k * rest).transpose(1, 2) @ updates
    return torch.cat(out, 1).transpose(0, 1), state


def _products(x: torch.Tensor, k: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """[2, H, C, C] for x[2, H, C, D]: x[i] . (exp(total[i] - total[j]) k[j]) for j <= i, else 0. No exponent is
    positive; those of i and j alone could overflow."""
    if total.shape[-1] == 1:
        return (x @ k.transpose(1, 2)) * _ratios(total).squeeze(-1).float()
    out = x.new_zeros(*x.shape[:3], x.shape[2])
    for first in range(0, x.shape[2], ROWS):  # each element of the key has a decay of its own
        rows = slice(first, first + ROWS)
        start = total[:, first : first + 1]
        decays = (total[:, rows] - start).float()
        before = (start - total[:, :first]).float().exp() * k[:, :first]
        out[..., rows, :first] = (x[:, :, rows] * decays.exp()) @ before.transpose(1, 2)
        out[..., rows, rows] = torch.einsum("xhid,hijd->xhij", x[:, :, rows], _ratios(decays) * k[:, None, rows])
    return out


def _ratios(total: torch.Tensor) -> torch.Tensor:
    """[H, C, C, D] for total[H, C, D]: exp(total[i] - total[j]) for j <= i, else 0."""
    later = torch.ones(total.shape[1], total.shape[1], dtype=torch.bool, device=total.device).triu(1)
    return (total[:, :, None] - total[:, None]).masked_fill(later[..., None], -torch.inf).exp()
