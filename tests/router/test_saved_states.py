"""Program states on disk: what is found there is what was kept, whatever memory has room for and whoever restarts."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from radixrt.messages import ChatMessage, GeneratedSegment, Namespace, Sampling
from radixrt.requests.validate import Refused
from radixrt.router.persistence import store as module
from radixrt.router.persistence.store import PersistentStore
from radixrt.router.programs.prompt_builder import NOTHING, Answer, Generated, Message, Part, State, Tools
from radixrt.router.programs.saved_states import Key, SavedStates
from radixrt.router.programs.state_store import ProgramStateStore


@pytest.fixture(autouse=True)
def _at_once(monkeypatch) -> None:
    monkeypatch.setattr(module, "BATCH_SECONDS", 0.0)
    monkeypatch.setattr(module, "READ_SECONDS", 20.0)


def shape(state: State) -> Any:
    """All that a state holds."""
    pieces = [*state.parts, *state.messages, *state.tools]
    slots = {Generated: Part.__slots__, Answer: ("fields", *Answer.__slots__)}
    each = [(type(one), [getattr(one, name) for name in slots.get(type(one), type(one).__slots__)]) for one in pieces]
    rest = state.encoded, state.open, state.is_prompt, state.namespace, state.answer, state.chars, state.ids
    return each, rest


class Kept(RuleBasedStateMachine):
    """Memory has room for a few states only, the disk for all."""

    LIMIT = 4000

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.runner = asyncio.Runner()
        self.model: dict[Key, Any] = {}
        self.open()

    def open(self) -> None:
        self.store = PersistentStore(self.folder, 64 << 20)
        self.states = ProgramStateStore(self.LIMIT, SavedStates(self.store, b"vocabulary"))

    keys = st.builds(Key, st.sampled_from("ab"), st.sampled_from(["s" * 16, "t" * 16]), st.integers(1, 4))
    kinds = st.lists(st.sampled_from(["text", "generated", "message", "answer", "tools"]), max_size=3)

    def find(self, key: Key) -> State | None:
        try:
            return self.runner.run(self.states.find(key))
        except Refused:
            return None

    @rule(key=keys, parent=keys, kinds=kinds, data=st.data(), goes=st.booleans())
    def put(self, key, parent, kinds, data, goes):
        parent = parent._replace(tenant=key.tenant)
        before = self.find(parent) or NOTHING
        parts, messages, tools = before.parts.copy(), before.messages.copy(), before.tools
        text = data.draw(st.text(max_size=100))
        for kind in kinds:
            match kind:
                case "text":
                    parts.append(Part(text, data.draw(st.sampled_from([None, b"1234"])), not parts))
                case "generated":
                    parts.append(Generated(text, b"5678"))
                case "message":
                    messages.append(Message({"role": "user", "content": text}))
                case "answer":
                    messages.append(Answer(text, {"role": "assistant", "content": None}, len(parts), "<end>"))
                case "tools":
                    tools = [Tools([{"type": "function", "function": {"name": text}}])]
        message = data.draw(st.sampled_from([None, ChatMessage(text)]))
        said = GeneratedSegment(b"9999", text, 7, Sampling(stop=("x",)), message) if data.draw(st.booleans()) else None
        encoded, open = data.draw(st.integers(0, len(parts))), data.draw(st.sampled_from([None, text]))
        namespace = data.draw(st.sampled_from([None, Namespace(key.tenant, "m", 3, "salt")]))
        state = State(parts, messages, encoded, open, not kinds, namespace, said, tools)
        replaces = parent if goes and parent in self.model else None
        self.states.put(key, state, replaces)
        if replaces is not None:
            del self.model[replaces]
        self.model[key] = shape(state)

    @rule(key=keys)
    def read(self, key):
        found = self.find(key)
        assert (found and shape(found)) == self.model.get(key)

    @rule(key=keys)
    def drop(self, key):
        self.states.drop(key)
        self.model.pop(key, None)

    @rule(tenant=st.sampled_from("ab"), scope=st.sampled_from(["s" * 16, None]))
    def forget(self, tenant, scope):
        self.states.forget(tenant, scope)
        for key in [key for key in self.model if key.tenant == tenant and scope in (None, key.scope)]:
            del self.model[key]

    @rule()
    def restart(self):
        self.store.close()
        self.open()

    @rule()
    def lose(self):
        """What is on disk may be gone: pieces are put again."""
        self.store._next_epoch()

    @invariant()
    def memory_is_counted(self):
        self.states.check()

    def teardown(self):
        self.runner.close()
        self.store.close()
        shutil.rmtree(self.folder)


TestKept = Kept.TestCase
TestKept.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)


def test_states_of_another_vocabulary_are_not_read(tmp_path):
    """Their token ids mean other text."""
    key = Key("a", "s" * 16, 1)
    for vocabulary, is_found in ((b"one", True), (b"other", False), (b"one", True)):
        store = PersistentStore(tmp_path, 64 << 20)
        saved = SavedStates(store, vocabulary)
        if vocabulary == b"one":
            saved.save(key, State([Part("text", b"1234")], [], 1, None, True, None))
        assert (asyncio.run(saved.load(key)) is not None) == is_found
        store.close()


def test_branches_share_in_memory_what_they_share_on_disk(tmp_path):
    trunk = Part("trunk" * 1000, bytes(4000))
    keys = [Key("a", "s" * 16, number) for number in range(1, 9)]
    store = PersistentStore(tmp_path, 64 << 20)
    states = ProgramStateStore(1 << 20, SavedStates(store, b""))
    for key in keys:
        states.put(key, State([trunk, Part(str(key.number), b"1234")], [], 2, None, True, None))
    before = states.bytes
    store.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 120_000
    store = PersistentStore(tmp_path, 64 << 20)
    states = ProgramStateStore(1 << 20, SavedStates(store, b""))
    for key in keys:
        asyncio.run(states.find(key))
    states.check()
    assert abs(states.bytes - before) < 1000
    store.close()


def test_a_turn_writes_what_is_new_of_it(tmp_path):
    """Not the whole history."""
    store = PersistentStore(tmp_path, 64 << 20)
    states = ProgramStateStore(64 << 20, SavedStates(store, b""))
    written: list[int] = []
    put = store.put
    store.put = lambda *args: written.append(sum(len(piece.data) for piece in args[4])) or put(*args)
    parts: list[Part] = []
    for number in range(1, 50):
        parts = [*parts, Part("x" * 1000, bytes(1000))]
        state = State(parts, [], len(parts), None, True, None)
        states.put(Key("a", "s" * 16, number), state, Key("a", "s" * 16, number - 1))
    assert max(written) < 2200
    store.close()
