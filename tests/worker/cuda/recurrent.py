"""What tests of recurrent layers share: linear attention and Mamba-2, both with a state for each sequence.

A `Case` is a layer with some tokens. It has `states()`, the first states of each slot, anew; `expected`, `decode`,
`by_chunks` and `by_tokens`, which return results and update states; and `part`, the same with some of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from radixrt.worker.cuda.recurrent.cutting import Runs
from radixrt.worker.cuda.recurrent.delta import LayerStates
from radixrt.worker.cuda.recurrent.delta_step import DeltaStep
from radixrt.worker.execution.kv_pool import StatePool
from radixrt.worker.plan import Parts, StateWork

SLOTS = 7
BOUNDS = [0, 1, 3, 67, 132, 262]
FEW_TOKENS = [0, 1, 3, 9, 19, 32]
"""In place of BOUNDS where each token takes long in the interpreter."""
DRAFTED = [3, 1, 4, 5, 0, 6, 2], [1, 3, 0, 0, 1, 2, 0]
"""Slots and lengths of runs: a decode, two drafted tokens after one, padding, and one drafted token after one."""


def limit(device: torch.device) -> float:
    """The largest relative error. On a GPU of bfloat16, elsewhere of float32."""
    return 1e-2 if device.type == "cuda" else 1e-5


def parts_of(slots: list[int], bounds: list[int], within: list[tuple[int, int, int]] = ()) -> Parts:
    """Those of sequences; `within` is (slot of a sequence, tokens, slot that the state after them is stored in)."""
    where, stored = np.array(slots, np.int32), np.array(within, np.int32).reshape(-1, 3).T
    none = np.zeros((2, 0), np.int32)
    return StateWork(where, none, none, stored).parts(np.diff(bounds))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def assert_alike(
    found: tuple[torch.Tensor, LayerStates], expected: tuple[torch.Tensor, LayerStates], most: float
) -> None:
    """Results and states."""
    assert error(found[0], expected[0]) < most
    assert torch.equal(found[1].conv[1:], expected[1].conv[1:])
    assert error(found[1].rule[1:], expected[1].rule[1:]) < most


def assert_same(found: LayerStates, expected: LayerStates, slot: int, of: int | None = None) -> None:
    """The states at a slot, to the last bit; those of `expected` at another one, if it is given."""
    for name in ("rule", "conv"):
        assert torch.equal(getattr(found, name)[slot], getattr(expected, name)[slot if of is None else of])


# ---------------------------------------------------------------- tests


def check_one_token_each(case: Any, device: torch.device, **how: Any) -> None:
    """Of six sequences; two rows are padding, whose slot 0 is not written."""
    slots = [3, 0, 1, 6, 0, 2]
    found, expected = case.states(), case.states()
    there = torch.tensor(slots, dtype=torch.int32, device=device)
    out = case.decode(Runs.of_ones(there), found, **how)
    real = case.expected(slots, list(range(len(slots) + 1)), expected)
    rows = there > 0
    assert_alike((out[rows], found), (real[rows], expected), limit(device))
    assert_same(found, case.states(), 0)


def check_many_tokens(case: Any, way: str, bounds: list[int], device: torch.device) -> None:
    """Of five sequences; states of other slots stay."""
    slots, found, expected = [3, 1, 5, 6, 2], case.states(), case.states()
    out = getattr(case, way)(slots, bounds, states=found)
    assert_alike((out, found), (case.expected(slots, bounds, expected), expected), limit(device))
    assert_same(found, case.states(), 4)


def check_padding_is_not_stored(case: Any) -> None:
    """Of 40 tokens. Whatever has slot 0 leaves it as it is."""
    for way in ("by_chunks", "by_tokens"):
        states = case.states()
        getattr(case, way)([0, 2], [0, 30, 40], states=states)
        assert_same(states, case.states(), 0)


def check_alone_as_in_company(case: Any, way: str, first: int, end: int, all_: int) -> None:
    """Tokens `first` to `end` of `all_`, to the last bit."""
    together, states = case.states(), case.states()
    out = getattr(case, way)([1, 2, 3], [0, first, end, all_], states=together)
    alone = case.part(slice(first, end))
    assert torch.equal(getattr(alone, way)([2], [0, end - first], states=states), out[first:end])
    assert_same(states, together, 2)


def check_tokens_do_not_depend_on_steps(case: Any) -> None:
    """20 tokens one by one, to the last bit: warm is cold, and a decode is what a prompt would have been."""
    whole, parted = case.states(), case.states()
    out = case.by_tokens([4], [0, 20], states=whole)
    cuts = (0, 1), (1, 2), (2, 11), (11, 20)
    parts = [case.part(slice(a, b)).by_tokens([4], [0, b - a], states=parted) for a, b in cuts]
    assert torch.equal(torch.cat(parts), out)
    assert torch.equal(whole.rule, parted.rule) and torch.equal(whole.conv, parted.conv)


def check_chunks_in_several_steps(case: Any, device: torch.device) -> None:
    """Of 200 tokens."""
    whole, parted = case.states(), case.states()
    out = case.by_chunks([4], [0, 200], states=whole)
    cuts = (0, 5), (5, 100), (100, 200)
    parts = [case.part(slice(a, b)).by_chunks([4], [0, b - a], states=parted) for a, b in cuts]
    assert_alike((torch.cat(parts), parted), (out, whole), limit(device))


def stops(way: str, device: torch.device) -> tuple[int, int, int]:
    """After how many tokens states are stored within a step and at its end."""
    return (4, 9, 14) if device.type == "cpu" and way == "by_tokens" else (70, 140, 150)


def check_states_within_a_step(case: Any, way: str, stops: tuple[int, int, int]) -> None:
    """They are those of a step that ends there; and what follows is the same, to the last bit."""
    first, second, end = stops
    within, alone = case.states(), case.states()
    out = getattr(case, way)([3, 1], [0, 5, end + 5], [(1, first, 5), (1, second, 6)], states=within)
    for slot, begin, stop in ((5, 0, first), (6, first, second), (0, second, end)):
        part = case.part(slice(5 + begin, 5 + stop))
        assert torch.equal(getattr(part, way)([1], [0, stop - begin], states=alone), out[5 + begin : 5 + stop])
        assert_same(within, alone, slot or 1, 1)
    for slot in (0, 2, 4):
        assert torch.equal(within.rule[slot], case.states().rule[slot])


def check_drafts(case: Any, by_tokens: bool, put: Callable[[DeltaStep, slice], torch.Tensor]) -> None:
    """Results of drafted tokens and the states after them have the bits of those of tokens one by one. `put`: the
    results of a step for some of a case's tokens. Of a draft, the first token's state is where the one before it was.
    """
    device = case.net.conv.device
    there, pools = replace(case.spec, layers=frozenset({0, 1})), []
    for _ in range(2):
        pools.append(StatePool(there, SLOTS, case.net.conv.dtype, device))
        for states, start in zip(pools[-1].layer(1), (case.states().conv, case.states().rule), strict=True):
            states.copy_(start)
    runs = Runs(*(torch.tensor(x, dtype=torch.int32, device=device) for x in DRAFTED))
    out = put(DeltaStep(pools[0], runs, None, by_tokens), slice(0, len(DRAFTED[0])))
    live = 0
    for at, (slot, length) in enumerate(zip(*DRAFTED, strict=True)):
        live = slot if length else live
        one = Runs.of_ones(torch.tensor([live], dtype=torch.int32, device=device))
        found = put(DeltaStep(pools[1], one, None, by_tokens), slice(at, at + 1))
        assert torch.equal(found, out[at : at + 1])
        for drafted, alone in zip(pools[0].layer(1), pools[1].layer(1), strict=True):
            if slot:
                assert torch.equal(drafted[slot], alone[live])
    assert torch.equal(pools[0].layer(1)[1][0], case.states().rule[0]), "padding is not stored"
