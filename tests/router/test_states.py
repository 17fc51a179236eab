"""States: kept within their bytes, whosever they are, and nobody else's."""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from radixrt.messages import GONE, NO_TENANT, GeneratedSegment, Sampling
from radixrt.requests.validate import Refused
from radixrt.router.programs.prompt_builder import NOTHING, Generated, Message, Part, Piece, State
from radixrt.router.programs.state_store import Key, ProgramStateStore


def state(parts=(), turns=(), answer=None, open=None) -> State:
    return State(list(parts), list(turns), len(parts), open, True, NO_TENANT, answer)


def known(states: ProgramStateStore, key: Key) -> State | None:
    try:
        return states.get(key)
    except Refused as refused:
        assert refused.code == GONE and refused.field == "prompt.state" and str(key.number) in str(refused)
        return None


def size_of(all_states: list[State]) -> int:
    pieces = {id(piece): piece.size for one in all_states for piece in (*one.parts, *one.messages)}
    return sum(one.size for one in all_states) + sum(pieces.values())


class Kept(RuleBasedStateMachine):
    """Against a list, the latest used last: the tenant whose states have most loses the first of his until all fit."""

    LIMIT = 6000

    def __init__(self) -> None:
        super().__init__()
        self.states = ProgramStateStore(self.LIMIT)
        self.model: list[tuple[Key, State]] = []

    keys = st.builds(Key, st.sampled_from("abc"), st.sampled_from(["s" * 16, "t" * 16]), st.integers(1, 6))

    def of(self, tenant: str) -> int:
        return size_of([one for key, one in self.model if key.tenant == tenant])

    @rule(key=keys, parent=keys, tokens=st.integers(0, 400), chars=st.integers(0, 300), answer=st.booleans())
    def put(self, key, parent, tokens, chars, answer):
        parent = parent._replace(tenant=key.tenant)
        before = next((one for k, one in self.model if k == parent), NOTHING)
        parts = [*before.parts, Generated("x" * chars, bytes(4 * tokens))] if tokens else before.parts
        turns = [*before.messages, Message({"role": "user", "content": "y" * chars})] if chars else before.messages
        said = GeneratedSegment(bytes(4 * tokens), "z" * chars, None, Sampling()) if answer else None
        new = state(parts, turns, said)
        self.states.put(key, new)
        self.model = [(k, one) for k, one in self.model if k != key] + [(key, new)]
        while size_of([one for _, one in self.model]) > self.LIMIT:
            most = min("abc", key=lambda tenant: (-self.of(tenant), tenant))
            self.model.remove(next((k, one) for k, one in self.model if k.tenant == most))

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
    states, trunk = ProgramStateStore(1 << 20), Part("x" * 10_000, bytes(40_000))
    key = Key("t", "s" * 16, 1)
    states.put(key, state([trunk]))
    alone = states.bytes
    for number in range(2, 102):
        states.put(key._replace(number=number), state([trunk, Part("own", bytes(8))]))
    assert alone > 50_000 and states.bytes < alone + 100 * 1000


def test_a_burst_of_one_tenant_costs_another_nothing():
    states, large = ProgramStateStore(100_000), bytes(4000)
    quiet = [Key("quiet", "s" * 16, number) for number in range(1, 6)]
    for key in quiet:
        states.put(key, state([Part("", large)]))
    for number in range(1, 500):
        states.put(Key("loud", "t" * 16, number), state([Part("", large)]))
    assert all(known(states, key) for key in quiet) and states.bytes > 95_000
    # Nobody keeps more than a share because he came first, either.
    for number in range(1, 500):
        states.put(Key("third", "u" * 16, number), state([Part("", large)]))
    left = {tenant: len(own) for tenant, own in states._states.items()}
    assert left["quiet"] == 5 and abs(left["loud"] - left["third"]) <= 1


def test_keeping_a_state_costs_what_is_new_in_it():
    """Pieces of a session that are looked at a turn: as many in the thousandth as in the tenth."""
    looked = 0

    class Counting(Part):
        __slots__ = ()

        @property
        def users(self) -> int:
            nonlocal looked
            looked += 1
            return Piece.users.__get__(self)

        @users.setter
        def users(self, value: int) -> None:
            Piece.users.__set__(self, value)

        before = property(lambda self: self._look(), lambda self, value: Piece.before.__set__(self, value))

        def _look(self) -> Piece | None:
            nonlocal looked
            looked += 1
            return Piece.before.__get__(self)

    states, key, parts, counts = ProgramStateStore(1 << 30), Key("t", "s" * 16, 1), [], []
    for number in range(1000):
        parts = [*parts, Counting("said"), Counting("answered", bytes(8))]
        before = looked
        states.put(key._replace(number=number + 1), state(parts))
        states.drop(key._replace(number=number))
        counts.append(looked - before)
    assert counts[10] == counts[999] < 30
    states.check()


def test_text_that_grows_when_it_is_encoded_counts_as_it_did():
    states, key, said = ProgramStateStore(1 << 20), Key("t", "s" * 16, 1), "é" * 100
    states.put(key, state([Part(said)], open=said))
    msgspec.json.encode(said)
    states.drop(key)
    assert states.bytes == 0


def test_what_was_asked_for_lately_stays():
    key, large = Key("t", "s" * 16, 1), bytes(4000)
    states = ProgramStateStore(10_000)
    for number in (1, 2):
        states.put(key._replace(number=number), state([Part("", large)]))
    states.get(key)
    states.put(key._replace(number=3), state([Part("", large)]))
    assert known(states, key) and known(states, key._replace(number=2)) is None


def test_nothing_is_kept_without_memory_and_the_first_state_is_always_known():
    states, key = ProgramStateStore(0), Key("t", "s" * 16, 1)
    states.put(key, state([Part("x", bytes(4))]))
    assert known(states, key) is None and states.bytes == 0
    assert states.get(key._replace(number=0)) is NOTHING
