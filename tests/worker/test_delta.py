"""Short convolutions and the gated delta rule against naive loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from radixrt.worker.model.layers.recurrent.delta import gated_delta, short_conv
from radixrt.worker.plan import StateWork


def bounds_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def naive_conv(x, weight, bias, before):
    """Of one sequence, whose last inputs are `before`[C, K - 1]."""
    inputs, out = [*before.t(), *x], []
    for token in range(len(x)):
        window = torch.stack(inputs[token : token + weight.shape[1]], 1)
        found = (window * weight).sum(1) + (0 if bias is None else bias)
        out.append(found / (1 + (-found).exp()))
    return torch.stack(out), torch.stack(inputs[len(x) :], 1)


@pytest.mark.parametrize("biased", [False, True])
def test_short_conv_is_a_convolution_of_each_sequence(biased):
    counts, slots = [1, 5, 2, 1, 70], torch.tensor([3, 1, 6, 2, 5])
    x, weight, bias = random(sum(counts), 6), random(6, 4, seed=1), random(6, seed=2) if biased else None
    states = random(8, 6, 3, seed=3)
    before = states.clone()
    out = short_conv(x, weight, bias, states, slots, bounds_of(counts))
    for slot, part, found in zip(slots.tolist(), x.split(counts), out.split(counts), strict=True):
        expected, state = naive_conv(part, weight, bias, before[slot])
        assert torch.allclose(found, expected, atol=1e-5) and torch.equal(states[slot], state)
    assert all(torch.equal(states[slot], before[slot]) for slot in (0, 4, 7)), "others' states are not touched"


def naive_delta(q, k, v, decay, beta, state):
    """Of one sequence and one head, by scalars and vectors in float64."""
    out = []
    for token in range(len(q)):
        unit = k[token] / math.sqrt(float(k[token] @ k[token]) + 1e-6)
        query = q[token] / math.sqrt(float(q[token] @ q[token]) + 1e-6) / math.sqrt(len(q[token]))
        state = state * decay[token].exp().view(-1, 1)
        state = state + torch.outer(unit, beta[token] * (v[token] - unit @ state))
        out.append(query @ state)
    return torch.stack(out), state


def delta_inputs(tokens: int, by_element: bool):
    q, k, v = random(tokens, 2, 8), random(tokens, 2, 8, seed=1), random(tokens, 6, 5, seed=2)
    shape = (tokens, 6, 8) if by_element else (tokens, 6)
    # Some decays forget all at once, others nearly nothing.
    decay = -(torch.rand(shape, generator=torch.Generator().manual_seed(3)) ** 8) * 30
    return q, k, v, decay, random(tokens, 6, seed=4).sigmoid()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("by_element", [False, True])
def test_gated_delta_is_the_recurrence(by_element, exact):
    counts, slots = [1, 5, 1, 64, 150], torch.tensor([3, 1, 6, 2, 5])
    inputs, states = delta_inputs(sum(counts), by_element), random(8, 6, 8, 5, seed=5)
    before = states.clone()
    out = gated_delta(*inputs, states, slots, bounds_of(counts), exact)
    parts = zip(*(x.double().split(counts) for x in (*inputs, out)), strict=True)
    for slot, (q, k, v, decay, beta, found) in zip(slots.tolist(), parts, strict=True):
        for head in range(6):
            mine = q[:, head // 3], k[:, head // 3], v[:, head], decay[:, head], beta[:, head]
            expected, state = naive_delta(*mine, before[slot, head].double())
            assert torch.allclose(found[:, head], expected, atol=1e-5)
            assert torch.allclose(states[slot, head].double(), state, atol=1e-5)
    assert all(torch.equal(states[slot], before[slot]) for slot in (0, 4, 7)), "others' states are not touched"


@pytest.mark.parametrize("cuts", [[100], [64, 36], [1] * 100, [37, 1, 62]])
def test_a_sequence_may_be_cut_anywhere(cuts):
    """Exactly: to the last bit; in chunks up to rounding. Beside another sequence or alone: always to the last bit."""
    inputs, x, weight = delta_inputs(100, False), random(100, 6), random(6, 4, seed=1)
    one, whole = torch.tensor([1]), bounds_of([100])
    conv_states, conv = torch.zeros(3, 6, 3), torch.zeros(3, 6, 3)
    expected = short_conv(x, weight, None, conv_states, one, whole)
    found = [short_conv(part, weight, None, conv, one, bounds_of([len(part)])) for part in x.split(cuts)]
    assert torch.equal(torch.cat(found), expected) and torch.equal(conv, conv_states)
    for exact in (False, True):
        states, cut = torch.zeros(3, 6, 8, 5), torch.zeros(3, 6, 8, 5)
        expected = gated_delta(*inputs, states, one, whole, exact)
        parts = zip(*(value.split(cuts) for value in inputs), strict=True)
        found = torch.cat([gated_delta(*part, cut, one, bounds_of([len(part[0])]), exact) for part in parts])
        if exact or cuts in ([100], [64, 36]):
            assert torch.equal(found, expected) and torch.equal(cut, states)
        else:
            assert torch.allclose(found, expected, atol=1e-5) and torch.allclose(cut, states, atol=1e-5)
    other = [torch.cat((value.flip(0)[:30], value)) for value in inputs]
    states = torch.zeros(3, 6, 8, 5)
    found = gated_delta(*other, states, torch.tensor([2, 1]), bounds_of([30, 100]))[30:]
    alone = gated_delta(*inputs, torch.zeros(3, 6, 8, 5), one, whole)
    assert torch.equal(found, alone)


def test_bfloat16_is_computed_in_float32():
    inputs = delta_inputs(90, False)
    narrow = [*(x.bfloat16() for x in inputs[:3]), inputs[3], inputs[4]]
    states = torch.zeros(2, 6, 8, 5)
    out = gated_delta(*narrow, states, torch.tensor([1]), bounds_of([90]))
    wide = gated_delta(*(x.float() for x in narrow), torch.zeros(2, 6, 8, 5), torch.tensor([1]), bounds_of([90]))
    assert out.dtype == torch.bfloat16 and torch.equal(out, wide.bfloat16())


def test_parts_of_drafts_and_of_a_prompt_with_a_checkpoint():
    """A draft of two tokens, a decode, and a prompt of 20 tokens whose state after 10 is stored."""
    none, integers = np.zeros((2, 0), np.int32), lambda *x: np.array(x, np.int32)
    work = StateWork(integers(3, 7, 8, 4, 5), none, none, integers([5], [10], [2]), integers(3, 0, 0, 1, 1))
    parts = work.parts(integers(1, 1, 1, 1, 20))
    assert parts.sources.tolist() == [3, 3, 7, 4, 5, 2] and parts.targets.tolist() == [3, 7, 8, 4, 2, 5]
    assert parts.bounds.tolist() == [0, 1, 2, 3, 4, 14, 24] and parts.owners.tolist() == [0, 0, 0, 3, 4, 4]


def test_drafted_tokens_give_what_tokens_one_by_one_do():
    """To the last bit; with a state after each. Two drafts, of 4 tokens and of 2."""
    inputs, x, weight = delta_inputs(6, True), random(6, 6), random(6, 4, seed=1)
    slots, to = torch.tensor([1, 1, 3, 4, 2, 2]), torch.tensor([1, 3, 4, 5, 2, 6])
    drafted, alone = ([random(7, 6, 3, seed=2), random(7, 6, 8, 5, seed=3)] for _ in range(2))
    ones = bounds_of([1] * 6)
    found = (
        short_conv(x, weight, None, drafted[0], slots, ones, to=to),
        gated_delta(*inputs, drafted[1], slots, ones, to=to),
    )
    for token, (live, slot) in enumerate(zip([1, 1, 1, 1, 2, 2], to.tolist(), strict=True)):
        rows, where, one = slice(token, token + 1), torch.tensor([live]), bounds_of([1])
        out = short_conv(x[rows], weight, None, alone[0], where, one)
        assert torch.equal(found[0][rows], out)
        assert torch.equal(found[1][rows], gated_delta(*(v[rows] for v in inputs), alone[1], where, one))
        for states, others in zip(drafted, alone, strict=True):
            assert torch.equal(states[slot], others[live])
