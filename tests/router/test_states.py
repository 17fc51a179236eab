"""States: kept within their bytes, whosever they are, and nobody else's."""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from radixrt.messages import SaidAnswer, Sampling
from radixrt.router.said import NOTHING, Generated, Part, State, Turn
from radixrt.router.states import GONE, Key, States
from radixrt.router.validate import Refused


def state(parts=(), turns=(), answer=None, open=None) -> State:
    return State(list(parts), list(turns), len(parts), open, True, "n", answer)


def known(states: States, key: Key) -> State | None:
    try:
        return states.get(key)
    except Refused as refused:
        assert refused.code == GONE and refused.field == "prompt.state" and str(key.number) in str(refused)
        return None


def size_of(all_states: list[State]) -> int:
    pieces = {id(piece): piece.size for one in all_states for piece in one.pieces}
    return sum(one.size for one in all_states) + sum(pieces.values())


class Kept(RuleBasedStateMachine):
    """Against a list, the latest used last, that is cut from the front until its pieces fit."""

    LIMIT = 6000

    def __init__(self) -> None:
        super().__init__()
        self.states = States(self.LIMIT)
        self.model: list[tuple[Key, State]] = []

    keys = st.builds(Key, st.sampled_from("ab"), st.sampled_from(["s" * 16, "t" * 16]), st.integers(1, 6))

    @rule(key=keys, parent=keys, tokens=st.integers(0, 400), chars=st.integers(0, 300), answer=st.booleans())
    def put(self, key, parent, tokens, chars, answer):
        before = next((one for k, one in self.model if k == parent), NOTHING)
        parts = [*before.parts, Generated("x" * chars, bytes(4 * tokens))] if tokens else before.parts
        turns = [*before.turns, Turn({"role": "user", "content": "y" * chars})] if chars else before.turns
        said = SaidAnswer(bytes(4 * tokens), "z" * chars, None, Sampling()) if answer else None
        new = state(parts, turns, said)
        self.states.put(key, new)
        self.model = [(k, one) for k, one in self.model if k != key] + [(key, new)]
        while size_of([one for _, one in self.model]) > self.LIMIT:
            self.model.pop(0)

    @rule(key=keys)
    def get(self, key):
        expected = next((one for k, one in self.model if k == key), None)
        assert known(self.states, key) is expected
        if expected is not None:
            self.model = [(k, one) for k, one in self.model if k != key] + [(key, expected)]

    @rule(key=keys)
    def drop(self, key):
        self.states.drop(key)
        self.model = [(k, one) for k, one in self.model if k != key]

    @rule(key=keys)
    def forget(self, key):
        self.states.forget(key.tenant, key.scope)
        self.model = [(k, one) for k, one in self.model if k[:2] != key[:2]]

    @invariant()
    def holds(self):
        self.states.check()
        assert len(self.states) == len(self.model)
        assert self.states.bytes == size_of([one for _, one in self.model]) <= self.LIMIT


TestKept = Kept.TestCase
TestKept.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_what_states_share_is_counted_once():
    states, trunk = States(1 << 20), Part("x" * 10_000, bytes(40_000))
    key = Key("t", "s" * 16, 1)
    states.put(key, state([trunk]))
    alone = states.bytes
    for number in range(2, 102):
        states.put(key._replace(number=number), state([trunk, Part("own", bytes(8))]))
    assert alone > 50_000 and states.bytes < alone + 100 * 1000


def test_text_that_grows_when_it_is_encoded_counts_as_it_did():
    states, key, said = States(1 << 20), Key("t", "s" * 16, 1), "é" * 100
    states.put(key, state([Part(said)], open=said))
    msgspec.json.encode(said)
    states.drop(key)
    assert states.bytes == 0


def test_what_was_asked_for_lately_stays():
    key, large = Key("t", "s" * 16, 1), bytes(4000)
    states = States(10_000)
    for number in (1, 2):
        states.put(key._replace(number=number), state([Part("", large)]))
    states.get(key)
    states.put(key._replace(number=3), state([Part("", large)]))
    assert known(states, key) and known(states, key._replace(number=2)) is None


def test_nothing_is_kept_without_memory_and_the_first_state_is_always_known():
    states, key = States(0), Key("t", "s" * 16, 1)
    states.put(key, state([Part("x", bytes(4))]))
    assert known(states, key) is None and states.bytes == 0
    assert states.get(key._replace(number=0)) is NOTHING
