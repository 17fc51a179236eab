"""Mamba-2's selective state spaces (arXiv 2405.21060) in torch.

Sequences are given as in `delta`: concatenated, with cumulative counts `bounds` and states at `slots`, which are
updated in place or written to the slots `to`, sequence after sequence. Each sequence is computed on its own, whatever
else is in the step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn import functional as F

from radixrt.worker.model.layers.moe import sigmoid
from radixrt.worker.model.layers.recurrent.delta import VECTOR, Rule, in_order

CHUNK = 64
"""Tokens that `_by_chunks` computes by matrix products."""
TOGETHER = 4
"""Sequences of one token that a CPU computes at once: more states would not stay in its caches."""


def state_space(
    x: torch.Tensor,
    step: torch.Tensor,
    rates: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    skip: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    bounds: torch.Tensor,
    exact: bool = False,
    to: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, H, P], of the dtype of x. For each token and head, with the state S [P, N]:

        S = exp(step rate) S + (step x) b^T;   y = S c + skip x

    x is [T, H, P]; `step` float32[T, H], at least 0; `rates` float32[H], negative; b, c [T, G, N], of which each serves
    H / G consecutive heads; `skip` float32[H]. `states` float32[S, H, P, N] may have any strides between slots.

    Sequences of one token, and all if `exact`, are computed token by token: a token's result is then the same, to the
    last bit, however its sequence is cut. Longer sequences are computed in chunks of CHUNK tokens from their first one
    on, by matrix products: the same up to the rounding of float32, which depends on where they are cut.
    """
    kind = x.dtype
    x, b, c, decay = x.float(), b.float(), c.float(), step * rates
    inputs = x * step[..., None], b, c, decay
    out = skip[:, None] * x
    firsts, owners = bounds[:-1], slots
    if len(x) > len(slots) or to is not None:  # otherwise nothing is to be read from a GPU
        counts, start, targets = bounds.diff(), 0, slots if to is None else to
        for count, slot, target in zip(counts.tolist(), slots.tolist(), targets.tolist(), strict=True):
            if count > 1 or to is not None:
                part = [value[start : start + count] for value in inputs]
                rule: Rule = _by_tokens if exact or count == 1 else in_order(_by_chunks, _by_tokens)
                outputs, states[target] = rule(*part, states[slot])
                out[start : start + count] += outputs
            start += count
        alone = counts == (1 if to is None else 0)
        firsts, owners = firsts[alone], owners[alone]
    each = max(1, len(owners)) if x.is_cuda else TOGETHER
    for at, own in zip(firsts.split(each), owners.split(each), strict=True):
        outputs, states[own] = _one_token(inputs[0][at], b[at], c[at], decay[at], states[own])
        out[at] += outputs
    return out.to(kind)


def gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    groups: int,
    eps: float,
    norm_first: bool = False,
    over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """RMSNorm of x[T, D] silu(gate[T, D]), for each of `groups` equal parts alone, times weight[D], in float32. Without
    a weight there is no norm; with `norm_first` the norm is that of x alone, and comes before the gate. `over_ranks`:
    of the mean of squares float32[T, 1] of the only part, of which other ranks have as many elements, the means of all
    of these, [T, ranks]."""
    # As in `delta.short_conv`.
    wide = gate.float()
    silu = F.silu(wide) if wide.is_cuda or wide.shape[1] % VECTOR == 0 else wide * sigmoid(wide)
    if weight is None:
        return (x.float() * silu).to(x.dtype)
    parts = (x.float() if norm_first else x.float() * silu).unflatten(1, (groups, -1))
    means = parts.square().mean(-1, keepdim=True)
    if over_ranks is not None:
        every = over_ranks(means[:, 0])
        # Added rank by rank: how torch.sum rounds may depend on the shape.
        means = (functools.reduce(torch.add, every.unbind(1)) / every.shape[1])[:, None, None]
    normed = weight.float() * (parts * torch.rsqrt(means + eps)).flatten(1)
    return (normed * silu if norm_first else normed).to(x.dtype)


def _one_token(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence as it is written, without the skip, of one token of each of B sequences: (output [B, H, P], new
    states [B, H, P, N], which take the place of `state`)."""
    heads = x.shape[1]
    b, c = (_repeated(value, heads)[:, :, None] for value in (b, c))
    # By float64, because on a CPU an element's last bit depends on its place (see `moe.sigmoid`).
    kept = decay.double().exp().float()
    added = x[..., None] * b
    state.mul_(kept[..., None, None]).add_(added)
    return torch.mul(state, c, out=added).sum(-1), state


def _by_tokens(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of one sequence: (output [T, H, P], new state [H, P, N])."""
    out, state = torch.empty_like(x), state.clone()[None]
    for token in range(len(x)):
        at = slice(token, token + 1)
        out[at], state = _one_token(x[at], b[at], c[at], decay[at], state)
    return out, state[0]


def _by_chunks(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, chunk by chunk (arXiv 2405.21060, section 6). With L the decays of a chunk summed up to a token, X its
    inputs and S the state before it:

        Y = A X + exp(L) (C S^T),   A[i, j] = exp(L[i] - L[j]) c[i] . b[j] for j <= i
        S = exp(L[last]) S + X^T (exp(L[last] - L) B)
    """
    out, heads = [], x.shape[1]
    parts = (value.transpose(0, 1).split(CHUNK, dim=1) for value in (x, b, c, decay))
    for x, b, c, decay in zip(*parts, strict=True):
        size = x.shape[1]
        total = decay.double().cumsum(1)  # differences of large sums are taken
        later = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
        ratios = (total[:, :, None] - total[:, None]).masked_fill(later, -torch.inf).exp().float()
        mixed = (c @ b.transpose(1, 2)).repeat_interleave(heads // len(b), 0) * ratios
        b, c = (_repeated(value.transpose(0, 1), heads).transpose(0, 1) for value in (b, c))
        fade, rest = total.exp().float(), (total[:, -1:] - total).exp().float()
        out.append(mixed @ x + fade[..., None] * (c @ state.transpose(1, 2)))
        state = fade[:, -1, None, None] * state + x.transpose(1, 2) @ (rest[..., None] * b)
    return torch.cat(out, 1).transpose(0, 1), state


def _repeated(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
