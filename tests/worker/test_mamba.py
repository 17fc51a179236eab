"""Mamba-2's state-space model against the recurrence, token by token and element by element."""

from __future__ import annotations

import pytest
import torch

from radixrt.worker.model.layers.recurrent.mamba import gated, state_space

HEADS, DIM, GROUPS, STATE = 6, 5, 2, 7
COUNTS, SLOTS = [1, 5, 1, 64, 1, 150], torch.tensor([3, 1, 6, 2, 7, 5])


def bounds_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def made(tokens: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, torch.Tensor]]:
    """(x, steps, b, c), (rates, skip): some steps forget all at once, others nearly nothing."""
    step = torch.rand(tokens, HEADS, generator=torch.Generator().manual_seed(3)) ** 8 * 30
    inputs = random(tokens, HEADS, DIM), step, random(tokens, GROUPS, STATE, seed=1), random(tokens, GROUPS, STATE)
    return inputs, (-random(HEADS, seed=4).abs(), random(HEADS, seed=5))


def ran(inputs, constants, states, slots, counts, exact=False, to=None):
    (x, step, b, c), (rates, skip) = inputs, constants
    return state_space(x, step, rates, b, c, skip, states, slots, bounds_of(counts), exact, to)


def naive(x, step, rate, b, c, skip, state):
    """Of one sequence and one head, in float64."""
    out = []
    for token in range(len(x)):
        state = state * (step[token] * rate).exp() + torch.outer(step[token] * x[token], b[token])
        out.append(state @ c[token] + skip * x[token])
    return torch.stack(out), state


@pytest.mark.parametrize("exact", [False, True])
def test_it_is_the_recurrence(exact):
    inputs, (rates, skip) = made(sum(COUNTS))
    states = random(9, HEADS, DIM, STATE, seed=6)
    before = states.clone()
    out = ran(inputs, (rates, skip), states, SLOTS, COUNTS, exact)
    parts = zip(*(value.double().split(COUNTS) for value in (*inputs, out)), strict=True)
    for slot, (x, step, b, c, found) in zip(SLOTS.tolist(), parts, strict=True):
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            rate, own = rates[head].double(), before[slot, head].double()
            expected, state = naive(x[:, head], step[:, head], rate, b[:, group], c[:, group], skip[head].double(), own)
            assert torch.allclose(found[:, head], expected, atol=2e-5)
            assert torch.allclose(states[slot, head].double(), state, atol=2e-5)
    assert all(torch.equal(states[slot], before[slot]) for slot in (0, 4, 8)), "others' states are not touched"


@pytest.mark.parametrize("cuts", [[100], [64, 36], [1] * 100, [37, 1, 62]])
def test_a_sequence_may_be_cut_anywhere(cuts):
    """Exactly: to the last bit; in chunks up to rounding. Beside other sequences or alone: always to the last bit."""
    inputs, constants = made(100)
    one = torch.tensor([1])
    for exact in (False, True):
        states, cut = (torch.zeros(3, HEADS, DIM, STATE) for _ in range(2))
        expected = ran(inputs, constants, states, one, [100], exact)
        parts = zip(*(value.split(cuts) for value in inputs), strict=True)
        found = torch.cat([ran(part, constants, cut, one, [len(part[0])], exact) for part in parts])
        if exact or cuts in ([100], [64, 36]):
            assert torch.equal(found, expected) and torch.equal(cut, states)
        else:
            assert torch.allclose(found, expected, atol=2e-5) and torch.allclose(cut, states, atol=2e-5)
    others = tuple(torch.cat((value.flip(0)[:30], value, value[:2])) for value in inputs)
    found = ran(others, constants, torch.zeros(5, HEADS, DIM, STATE), torch.tensor([2, 1, 3, 4]), [30, 100, 1, 1])
    assert torch.equal(found[30:130], ran(inputs, constants, torch.zeros(3, HEADS, DIM, STATE), one, [100]))
    first = tuple(value[:1] for value in inputs)
    assert torch.equal(found[130:131], ran(first, constants, torch.zeros(3, HEADS, DIM, STATE), one, [1]))


def test_bfloat16_is_computed_in_float32():
    (x, step, b, c), constants = made(90)
    narrow = x.bfloat16(), step, b.bfloat16(), c.bfloat16()
    one = torch.tensor([1])
    out = ran(narrow, constants, torch.zeros(2, HEADS, DIM, STATE), one, [90])
    wide = ran([value.float() for value in narrow], constants, torch.zeros(2, HEADS, DIM, STATE), one, [90])
    assert out.dtype == torch.bfloat16 and torch.equal(out, wide.bfloat16())


def test_states_may_lie_apart():
    """As those of one layer do in the pool."""
    inputs, constants = made(sum(COUNTS))
    pool = random(9, 3, HEADS, DIM, STATE, seed=6)
    alone = pool[:, 1].clone()
    out = ran(inputs, constants, pool[:, 1], SLOTS, COUNTS)
    assert torch.equal(out, ran(inputs, constants, alone, SLOTS, COUNTS)) and torch.equal(pool[:, 1], alone)


def test_the_norm_is_of_each_group_after_its_gate():
    x, gate, weight = random(4, 12), random(4, 12, seed=1), random(12, seed=2)
    found = gated(x, gate, weight, 3, 1e-5)
    product = x.double() * gate.double() / (1 + (-gate.double()).exp())
    for group in range(3):
        part = slice(4 * group, 4 * group + 4)
        size = (product[:, part].square().mean(1, keepdim=True) + 1e-5).sqrt()
        assert torch.allclose(found[:, part].double(), weight[part] * product[:, part] / size, atol=1e-5)


def test_a_token_is_the_same_in_any_company():
    """To the last bit: elements at the end of a tensor are not computed as others are."""
    inputs, constants = made(51)
    states, slots = random(52, HEADS, DIM, STATE, seed=6), torch.arange(1, 52)
    gate, weight = random(51, HEADS * DIM, seed=7), random(HEADS * DIM, seed=8)
    together = states.clone()
    out = ran(inputs, constants, together, slots, [1] * 51)
    normed = gated(out.flatten(1), gate, weight, GROUPS, 1e-5)
    for token in range(51):
        own, one = states.clone(), slice(token, token + 1)
        alone = ran([value[one] for value in inputs], constants, own, slots[one], [1])
        assert torch.equal(alone, out[one]) and torch.equal(own[slots[token]], together[slots[token]])
        assert torch.equal(gated(alone.flatten(1), gate[one], weight, GROUPS, 1e-5), normed[one])


def test_drafted_tokens_give_what_tokens_one_by_one_do():
    """To the last bit; with a state after each. Two drafts, of 4 tokens and of 2."""
    inputs, constants = made(6)
    drafted, alone = (random(7, HEADS, DIM, STATE, seed=6) for _ in range(2))
    owners, to = [1, 1, 1, 1, 2, 2], torch.tensor([1, 3, 4, 5, 2, 6])
    found = ran(inputs, constants, drafted, torch.tensor([1, 1, 3, 4, 2, 2]), [1] * 6, to=to)
    for token, (owner, slot) in enumerate(zip(owners, to.tolist(), strict=True)):
        part = [value[token : token + 1] for value in inputs]
        assert torch.equal(ran(part, constants, alone, torch.tensor([owner]), [1]), found[token : token + 1])
        assert torch.equal(drafted[slot], alone[owner])
