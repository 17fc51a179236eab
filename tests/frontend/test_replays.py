"""Recorded conversations replayed over HTTP, their answers forced through the sampler: every prompt hits what a cache
that forgets nothing would, and that is all of the prompt before it and of its answer."""

from __future__ import annotations

import json
import random
from bisect import bisect, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.frontend.scripted import Model, scripted
from tests.frontend.test_sessions import cached, common, odd
from tests.recorded import CORPORA, Message, chats, client_echo

FIND = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


class InfiniteCache:
    """Every sequence that was computed, sorted: the longest common prefix is with a neighbour."""

    def __init__(self) -> None:
        self._sequences: list[bytes] = []

    def add(self, ids: np.ndarray) -> None:
        insort(self._sequences, ids.astype(">i4").tobytes())

    def bound(self, ids: np.ndarray) -> int:
        """Leading ids of a prompt that were computed before."""
        at = bisect(self._sequences, ids.astype(">i4").tobytes())
        neighbours = [np.frombuffer(one, ">i4") for one in self._sequences[max(at - 1, 0) : at + 1]]
        return max((common(ids, one) for one in neighbours), default=0)


@dataclass
class Sums:
    conversations: int = 0
    turns: int = 0
    later_turns: int = 0
    """Turns with one before them."""
    prompt_tokens: int = 0
    hit_tokens: int = 0
    bound_tokens: int = 0
    dropped: int = 0


class Replay:
    """Conversations, one after the other, with one server."""

    def __init__(self, model: Model, tools: list[dict[str, Any]] | None) -> None:
        self._model, self._tools = model, tools
        self._cache = InfiniteCache()
        self._rng = random.Random(0)
        self.sums = Sums()

    def play(self, conversations: Iterable[list[Message]]) -> Sums:
        for chat in conversations:
            self.sums.conversations += 1
            self._talk(chat)
        return self.sums

    def _talk(self, chat: list[Message]) -> None:
        sent: list[Message] = []
        ids: dict[str, str] = {}
        before: np.ndarray | None = None
        for message in chat:
            if message["role"] != "assistant":
                call_id = {"tool_call_id": ids[message["tool_call_id"]]} if "tool_call_id" in message else {}
                sent.append(message | call_id)
                continue
            found, before = self._turn(sent, message, before)
            calls = message.get("tool_calls") or (), found.get("tool_calls") or ()
            ids |= {old["id"]: new["id"] for old, new in zip(*calls, strict=True)}
            sent.append(client_echo(found, self._rng))

    def _turn(self, sent: list[Message], message: Message, before: np.ndarray | None) -> tuple[Message, np.ndarray]:
        """(the answer as the client has it, all that was computed for it)"""
        model, sums = self._model, self.sums
        model.answers.clear()
        model.script.texts = deque([odd(model, as_written(message))])
        answer = model.client.chat.completions.create(model="m", messages=sent, tools=self._tools)
        ((request, _, _, generated),) = model.answers
        prompt = np.frombuffer(request.prompt.ids, "<i4")
        bound = self._cache.bound(prompt)
        # The last token of a prompt is computed always.
        assert cached(answer) == min(bound, len(prompt) - 1)
        if before is not None:
            sums.later_turns += 1
            assert bound >= len(before), answer.model_extra["radixrt"]
        whole = np.concatenate([prompt, np.array(generated[:-1], "<i4")])
        self._cache.add(whole)
        sums.turns += 1
        sums.prompt_tokens += len(prompt)
        sums.hit_tokens += cached(answer)
        sums.bound_tokens += min(bound, len(prompt) - 1)
        sums.dropped += len(answer.model_extra["radixrt"].get("session", {}).get("dropped", ()))
        return answer.choices[0].message.model_dump(exclude_none=True) | {"role": "assistant"}, whole


def as_written(message: Message) -> str:
    """What the model wrote for a recorded answer."""
    text = message.get("content") or ""
    for call in message.get("tool_calls") or ():
        function = call["function"]
        text += f'\n<tool_call>\n{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}\n</tool_call>'
    return text


def tools_of(shared_data: Path, name: str) -> list[dict[str, Any]] | None:
    if name == "tau_bench":
        return json.loads((shared_data / name / "airline_tools.json").read_text())
    return [FIND] if name == "tau2_bench" else None


def replayed(
    folder: Path, shared_data: Path, name: str, count: int | None = None, turns: range = range(1, 1 << 20)
) -> Sums:
    """The sums of the first `count` conversations of a corpus that have so many `turns`; the report must have the
    same."""
    found = (chat for chat in chats(shared_data, name) if sum(m["role"] == "assistant" for m in chat) in turns)
    with scripted("hermes", folder, num_pages=1 << 24, context=1 << 20) as model:
        sums = Replay(model, tools_of(shared_data, name)).play(islice(found, count))
        total = model.client.get("/report", cast_to=object)["total"]
    told = [total[key] for key in ("requests", "prompt_tokens", "hit_tokens", "bound_tokens")]
    assert told == [sums.turns, sums.prompt_tokens, sums.hit_tokens, sums.bound_tokens]
    assert sums.hit_tokens == sums.bound_tokens and not sums.dropped
    return sums


@pytest.mark.parametrize("name", CORPORA)
def test_some_conversations_hit_all_that_was_computed(tmp_path, shared_data, name):
    count, turns = (4, range(4, 6)) if name == "mint_bench" else (2, range(6, 12))
    assert replayed(tmp_path, shared_data, name, count, turns).later_turns >= 10


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CORPORA)
def test_all_conversations_hit_all_that_was_computed(tmp_path, shared_data, name, record_property):
    sums = replayed(tmp_path, shared_data, name)
    assert sums.later_turns > 100
    for key, value in asdict(sums).items():
        record_property(key, value)
    print(name, sums, f"hit rate {sums.hit_tokens / sums.prompt_tokens:.2%}")
