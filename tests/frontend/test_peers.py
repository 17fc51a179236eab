"""Several front ends of one router: whichever a request comes to, it is served as by one alone."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from radixrt.client import ServerError
from radixrt.config import FrontendConfig, resolve
from radixrt.frontend.generate.shared_store import SharedStore
from radixrt.frontend.server import FrontendThread
from radixrt.messages import Done, Error, Info, Recall, Share
from tests.frontend.scripted import Model, scripted
from tests.frontend.test_sessions import CALL, WEATHER, cached, echoed, odd, sequences, user

KEYS = ("a:key-a", "b:key-b")


class Others:
    """A router with front ends, and a client of each."""

    def __init__(self, model: Model, folder: Path) -> None:
        self.model, self._folder = model, folder
        self.clients = [model.client]
        self._started: list[FrontendThread] = []

    def start(self, **settings: Any) -> None:
        fields = {"served_model_name": "m", "model": str(self._folder), "api_key": KEYS, "share_sessions": True}
        config = FrontendConfig(**(fields | {"router": self.model.router, "port": 0} | settings))
        frontend = FrontendThread(resolve(config))
        self.model.attach(frontend._server._frontend)
        self._started.append(frontend)
        self.clients.append(openai.OpenAI(base_url=frontend.url + "/v1", api_key="key-a", max_retries=0))

    def forget(self, tenant: str) -> None:
        """Returns when the front ends know."""
        thread, told = self.model.router_thread, threading.Event()

        def work() -> None:
            thread.server._handlers.forget_tenant(tenant)
            told.set()

        thread._loop.call_soon_threadsafe(work)
        assert told.wait(5)
        for client in self.clients:  # the router's messages arrive in order
            client.models.list()

    def stop(self) -> None:
        """The one that was started last."""
        self.clients.pop().close()
        self._started.pop().stop()

    def stop_all(self) -> None:
        while self._started:
            self.stop()

    def says(self, *texts: str) -> None:
        self.model.script.texts = deque(odd(self.model, text) for text in texts)

    def chat(self, at: int, messages: list[Any], *texts: str, key: str = "key-a", **fields: Any) -> Any:
        self.says(*texts)
        client = self.clients[at].with_options(api_key=key)
        return client.chat.completions.create(model="m", messages=messages, **fields)

    def respond(self, at: int, text: str, key: str = "key-a", **fields: Any) -> Any:
        self.says(text)
        return self.clients[at].with_options(api_key=key).responses.create(model="m", **fields)


@pytest.fixture(scope="module")
def started(tmp_path_factory) -> Iterator[Others]:
    folder = tmp_path_factory.mktemp("hermes")
    with scripted("hermes", folder, api_key=KEYS, share_sessions=True) as model:
        model.client.api_key = "key-a"
        others = Others(model, folder)
        others.start()
        yield others
        others.stop_all()


@pytest.fixture
def others(started) -> Others:
    started.model.answers.clear()
    return started


def test_turns_that_alternate_hit_all_that_was_computed(others):
    messages = [user("How is Paris?")]
    for turn in range(6):
        answer = others.chat(turn % 2, messages, f"Let me see, {turn}. {CALL}", tools=[WEATHER])
        message = answer.choices[0].message
        if turn:
            before = sequences(others.model)[-2]
            assert cached(answer) == len(before)
            assert sequences(others.model)[-1][: len(before)].tolist() == before.tolist()
            assert answer.model_extra["radixrt"]["session"]["kept_turns"] == turn
        messages += [echoed(message), {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}]


def test_a_front_end_that_starts_anew_has_lost_nothing(others):
    messages = [user("Will you remember?")]
    response = others.respond(1, "Yes, I shall.", input="Remember this.")
    for text in ("Certainly, I shall.", "And this too, certainly."):
        messages += [echoed(others.chat(1, messages, text).choices[0].message), user("More.")]
    before = sequences(others.model)[-1]
    others.stop()
    others.start()
    answer = others.chat(1, messages, "It is all there.")
    assert cached(answer) == len(before) and answer.model_extra["radixrt"]["session"]["kept_turns"] == 2
    others.respond(1, "I do.", input="Do you?", previous_response_id=response.id)
    assert [m["content"] for m in others.model.answers[-1][1].messages] == [
        "Remember this.",
        "Yes, I shall.",
        "Do you?",
    ]


def test_a_tenant_that_is_forgotten_is_so_at_every_front_end(others):
    """The others' conversations go on as if nothing had happened."""
    chats = {key: [user(f"Will you remember {key}?")] for key in ("key-a", "key-b")}
    for key, messages in chats.items():
        for turn in range(2):
            message = others.chat(turn, messages, "Certainly, I shall.", key=key).choices[0].message
            messages += [echoed(message), user("More.")]
    kept = {"key-a": 0, "key-b": 2}
    others.forget("a")
    for at in (0, 1):
        for key, messages in chats.items():
            answer = others.chat(at, messages, "It is all there, certainly.", key=key)
            assert answer.model_extra["radixrt"].get("session", {}).get("kept_turns", 0) == kept[key]


@pytest.mark.parametrize("stream", [False, True])
def test_responses_go_on_from_any(others, stream):
    last = None
    for turn in range(4):
        fields = {"input": f"Question {turn} of {stream}.", "previous_response_id": last, "stream": stream}
        found = others.respond(turn % 2, f"The answer number {turn}, it is.", **fields)
        response = list(found)[-1].response if stream else found
        last = response.id
        if turn:
            assert response.usage.input_tokens_details.cached_tokens == len(sequences(others.model)[-2])
    assert len(others.model.answers[-1][1].messages) == 7
    for client in others.clients:
        assert client.responses.retrieve(last).output_text == "The answer number 3, it is."


def test_what_is_deleted_is_gone_everywhere(others):
    first = others.respond(0, "One.", input="1")
    second = others.respond(1, "Two.", input="2", previous_response_id=first.id)
    others.clients[1].responses.delete(first.id)
    for at, client in enumerate(others.clients):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.delete(first.id)
        with pytest.raises(openai.BadRequestError) as caught:
            others.respond(at, "x", input="3", previous_response_id=first.id)
        assert caught.value.param == "previous_response_id"
        others.respond(at, "Three.", input="3", previous_response_id=second.id)
        assert [m["content"] for m in others.model.answers[-1][1].messages] == ["1", "One.", "2", "Two.", "3"]


def test_tenants_do_not_share(others):
    response = others.respond(0, "Mine alone, it is.", input="Whose?")
    with pytest.raises(openai.BadRequestError):
        others.respond(1, "x", key="key-b", input="?", previous_response_id=response.id)
    fields = {"input": "?", "previous_response_id": response.id}
    with pytest.raises(openai.BadRequestError):
        others.respond(1, "x", extra_body={"cache_salt": "s"}, **fields)
    others.respond(1, "Yours.", **fields)
    messages = [user("Whose is it?")]
    messages += [echoed(others.chat(0, messages, "Mine alone, it is.").choices[0].message), user("Really?")]
    assert "session" not in others.chat(1, messages, "No.", key="key-b").model_extra["radixrt"]
    assert "session" not in others.chat(1, messages, "No.", extra_body={"cache_salt": "s"}).model_extra["radixrt"]
    assert others.chat(1, messages, "Yes.").model_extra["radixrt"]["session"]["kept_turns"] == 1


def test_one_that_does_not_share_is_told_nothing(others):
    others.start(share_sessions=False)
    try:
        response = others.respond(0, "Here alone, it is.", input="Where?")
        with pytest.raises(openai.BadRequestError):
            others.respond(2, "x", input="?", previous_response_id=response.id)
        alone = others.respond(2, "There alone, it is.", input="Where?")
        with pytest.raises(openai.NotFoundError):
            others.clients[0].responses.retrieve(alone.id)
    finally:
        others.stop()


# ---------------------------------------------------------------- when the router does not help


class Deaf:
    """A transport to a router that answers each request with what it is told to, or not at all."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.asked, self.told = answer, [], []

    def submit(self, request: Share | Recall, on_answer: Any) -> int:
        self.asked.append(request)
        self.told.append(on_answer)
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is not None:
            on_answer(self.answer)
        return 1


@pytest.mark.parametrize("answer", [None, Error(1, 401, "no"), ServerError(503, "the router does not read")])
def test_a_router_that_does_not_answer_knows_nothing(monkeypatch, answer):
    monkeypatch.setattr("radixrt.frontend.generate.shared_store.SECONDS", 0.01)
    transport = Deaf(answer)
    shared_store = SharedStore(lambda: transport)

    async def ask() -> list[bytes | None]:
        shared_store.share([(b"k", b"v")], "key")
        await shared_store.settled()
        return await shared_store.recall([b"k", b"l"], "key")

    assert asyncio.run(ask()) == [None, None] and len(transport.asked) == 2
    transport.answer = Info(1, [b"v", None])
    assert asyncio.run(ask()) == [b"v", None]


def test_what_is_used_is_told_once_in_a_while(monkeypatch):
    transport = Deaf(None)
    shared_store = SharedStore(lambda: transport)
    shared_store.touch([b"k", b"l"], "key")
    shared_store.touch([b"k", b"m"], "key")
    shared_store.touch([b"k"], "key")
    assert [(one.entries, one.used) for one in transport.asked] == [([], [b"k", b"l"]), ([], [b"m"])]
    monkeypatch.setattr(shared_store, "_touched_until", 0.0)
    shared_store.touch([b"k"], "key")
    assert transport.asked[-1].used == [b"k"]
    transport.answer = ServerError(503, "the router does not read")
    shared_store.touch([b"n"], "key")


def test_the_end_of_an_answer_waits_for_the_router():
    """So that whoever has read the answer finds it at any front end."""
    transport, seen = Deaf(None), []
    shared_store = SharedStore(lambda: transport)

    async def settle(number: int) -> None:
        await shared_store.settled()
        seen.append(number)

    async def run() -> None:
        await shared_store.settled()
        shared_store.share([(b"k", b"1")], "key")
        first = asyncio.create_task(settle(1))
        await asyncio.sleep(0)
        shared_store.share([(b"k", b"2")], "key")
        second = asyncio.create_task(settle(2))
        for told in range(1, 3):
            for _ in range(3):
                await asyncio.sleep(0)
            assert seen == list(range(1, told))
            transport.told[told - 1](Done(told))
        await asyncio.gather(first, second)
        assert seen == [1, 2]
        await shared_store.settled()

    asyncio.run(run())


def test_every_answer_is_settled_before_its_end(others, monkeypatch):
    shared_store = others._started[-1]._server._frontend._shared_store
    asked, settled = [], shared_store.settled

    async def noting() -> None:
        asked.append(shared_store._sent)
        await settled()
        assert shared_store._taken >= asked[-1]

    monkeypatch.setattr(shared_store, "settled", noting)
    list(others.chat(1, [user("a")], "Yes.", stream=True))
    others.chat(1, [user("b")], "Yes.")
    others.respond(1, "Yes.", input="c")
    list(others.respond(1, "Yes.", input="d", stream=True))
    with anthropic.Anthropic(base_url=str(others.clients[1].base_url)[:-3], api_key="key-a", max_retries=0) as client:
        others.says("Yes.")
        client.messages.create(model="m", max_tokens=50, messages=[user("e")])
    assert len(asked) == 5 and asked == sorted(set(asked))
