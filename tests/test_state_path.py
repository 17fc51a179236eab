"""kill -9 and a restart: with --state-path the next turn of every kind of conversation has the token ids that it would
have had without, and so hits to the last token what a worker has kept."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from radixrt.client import Client, ServerError
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.lang import Branch, assistant, gen, program, user
from radixrt.lang.history import History
from radixrt.launch.launcher import Stack
from radixrt.messages import Sampling, StatePrompt, TextSegment
from radixrt.process.ports import free_tcp_address
from radixrt.process.subprocesses import stop_subprocesses
from tests.waiting import eventually

WRITTEN_SECONDS = 0.3
"""After which an answer is on disk, with room to spare."""
TWELVE = Sampling(max_tokens=12, ignore_eos=True)
KEYS = ("a:key-a", "b:key-b")
SCOPE = "0123456789abcdef"


def port() -> int:
    return int(free_tcp_address().rpartition(":")[2])


class Served:
    """The processes of `radixrt serve nano` with a simulated worker, whose random answers no encoding of their text
    gives."""

    def __init__(self, state_path: Path | str, frontends: int = 1, keys: tuple[str, ...] = KEYS) -> None:
        names = {"model": "nano", "api_key": keys}
        addresses = {"client_address": free_tcp_address(), "worker_address": free_tcp_address()}
        self._config = StackConfig(
            resolve(RouterConfig(**names, **addresses, state_path=str(state_path), worker_timeout=2.0)),
            WorkerConfig(model="nano", fake="0,0", max_model_len=8192, device="cpu"),
            resolve(FrontendConfig(**names, port=port())),
            api_server_count=frontends,
            ready_timeout=60.0,
        )
        self._stack = Stack(self._config)
        self._stack.start()

    @property
    def address(self) -> str:
        return self._config.router.client_address

    def post(self, path: str, body: dict[str, Any], key: str = "key-a") -> dict[str, Any]:
        url = f"http://127.0.0.1:{self._config.frontend.port}/v1{path}"
        headers = {"authorization": f"Bearer {key}"}
        answer = httpx.post(url, json={"model": "nano", **body}, headers=headers, timeout=30.0)
        return answer.json() | {"status": answer.status_code}

    def client(self, key: str = "key-a") -> Client:
        return Client(self.address, api_key=key)

    def restart_router(self, seconds: float = WRITTEN_SECONDS) -> None:
        """kill -9 the router, with the front end in it; the worker keeps its pages."""
        time.sleep(seconds)
        (router,) = (child for child in self._stack._subprocesses if child.role == "router")
        router.process.kill()
        stop_subprocesses([router])
        self._stack._subprocesses.remove(router)
        frontend = self._stack._frontend_config()
        http = resolve(frontend) if self._config.api_server_count == 1 else None
        self._stack._start_router(http, time.monotonic() + 30)
        with self.client() as client:
            eventually(lambda: len(client.health()["workers"]) == 1, 20)

    def restart_all(self) -> None:
        """kill -9 every process."""
        time.sleep(WRITTEN_SECONDS)
        for child in self._stack._subprocesses:
            for process in (*psutil.Process(child.process.pid).children(recursive=True), child.process):
                os.kill(process.pid, signal.SIGKILL)
        self.close()
        self._stack = Stack(self._config)
        self._stack.start()

    def with_keys(self, keys: tuple[str, ...]) -> None:
        """`restart_all` with other API keys."""
        parts = {"router": self._config.router, "frontend": self._config.frontend}
        changed = {name: dataclasses.replace(part, api_key=keys) for name, part in parts.items()}
        self._config = dataclasses.replace(self._config, **changed)
        self.restart_all()

    def close(self) -> None:
        self._stack.stop()


@contextmanager
def served(*args: Any, **settings: Any) -> Iterator[Served]:
    running = Served(*args, **settings)
    try:
        yield running
    finally:
        running.close()


def cached(answer: dict[str, Any]) -> int:
    usage = answer["usage"]
    return (usage.get("prompt_tokens_details") or usage["input_tokens_details"])["cached_tokens"]


class Chat:
    """Over HTTP; the assistant's message is sent back as text. `computed`: prompt and answer of the first turn."""

    def __init__(self, to: Served) -> None:
        self._to, self._messages = to, [{"role": "user", "content": "How are things in Paris?"}]
        first = self._ask()
        choice = first["choices"][0]
        self.computed = [*first["prompt_token_ids"], *choice["token_ids"]]
        answer = {"role": "assistant", "content": choice["message"]["content"]}
        self._messages += [answer, {"role": "user", "content": "More."}]

    def _ask(self, key: str = "key-a") -> dict[str, Any]:
        body = {"messages": self._messages, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
        return self._to.post("/chat/completions", body, key)

    def next(self, key: str = "key-a") -> tuple[list[int], int]:
        """The prompt of the second turn, and how much of it was cached."""
        answer = self._ask(key)
        return answer["prompt_token_ids"], cached(answer)


def said(*texts: str, **fields: Any) -> StatePrompt:
    return StatePrompt(SCOPE, transcript=[TextSegment(text) for text in texts], **fields)


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("state")) as one:
        yield one


def test_the_next_turn_after_a_killed_router_hits_all_that_was_computed(running):
    """Its prompt has the ids that the worker, which kept its pages, has computed and generated before."""
    chat = Chat(running)
    ask = {"input": "Remember this.", "max_output_tokens": 12}
    first = running.post("/responses", ask)
    second = running.post("/responses", ask | {"previous_response_id": first["id"]})
    with running.client() as client:
        asked = [{"role": "user", "content": "What do you see?"}]
        answer = client.generate(asked, TWELVE)
        one = client.generate(said("It was a dark", save=1), TWELVE)
        two = client.generate(said(" and stormy", state=1, save=2, replaces=True), TWELVE)

    running.restart_router()

    ids, hit = chat.next()
    assert ids[: len(chat.computed)] == chat.computed and hit == len(chat.computed) - 1, "echoed over HTTP"
    third = running.post("/responses", ask | {"previous_response_id": second["id"]})
    assert third["status"] == 200 and cached(third) == second["usage"]["total_tokens"] - 1, "a stored response"
    asked += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And now?"}]
    with running.client() as client:
        more = client.generate(asked, TWELVE)
        assert more.usage.cached_tokens == answer.usage.prompt_tokens + 12 - 1, "echoed by the native client"
        three = client.generate(said(" night", state=2, save=3), TWELVE)
        assert three.usage.cached_tokens == two.usage.prompt_tokens + 12 - 1, "a state of a program"
        assert two.usage.prompt_tokens > one.usage.prompt_tokens + 12
        with pytest.raises(ServerError, match="state 1 is not known"):
            client.generate(said(state=1), TWELVE)
        with running.client("key-b") as other, pytest.raises(ServerError, match="state 2 is not known"):
            other.generate(said(state=2), TWELVE)
    assert running.post("/responses", ask | {"previous_response_id": second["id"]}, "key-b")["status"] == 400
    assert chat.next("key-b")[0] != ids, "of another tenant"


def test_programs_go_on_after_a_killed_router(running, monkeypatch):
    """From the states that their branches hold; the history is not sent again."""
    monkeypatch.setattr(History, "whole", None)

    @program
    async def talk(s: Branch) -> tuple[int, list[int]]:
        s += user("Tell me a story.")
        s += assistant(gen("one", max_tokens=12, ignore_eos=True))
        await s["one"]
        branches = s.fork(2)
        for branch in branches:
            branch += user("Go on.")
        await asyncio.sleep(WRITTEN_SECONDS)
        await asyncio.to_thread(running.restart_router)
        for branch in branches:
            branch += assistant(gen("two", max_tokens=12, ignore_eos=True))
        usages = [(await branch.value("two")).usage for branch in branches]
        return (await s.value("one")).usage.prompt_tokens, [one.cached_tokens for one in usages]

    with running.client() as client:
        before, hits = talk.run(client)
        assert min(hits) >= before + 12 - 1


def test_the_prompts_after_the_whole_stack_was_killed_are_those_of_one_that_goes_on(running):
    chat = Chat(running)
    response = running.post("/responses", {"input": "Remember this.", "max_output_tokens": 12})
    uninterrupted, _ = chat.next()
    running.restart_all()
    assert chat.next() == (uninterrupted, 0)
    asked = {"input": "More.", "max_output_tokens": 12, "previous_response_id": response["id"]}
    assert running.post("/responses", asked)["usage"]["input_tokens"] > response["usage"]["total_tokens"]


@pytest.mark.slow
def test_no_tenant_reaches_anothers_conversations_by_keys_of_a_later_start(tmp_path):
    """Of several front ends."""
    with served(tmp_path, 2) as running:
        chat = Chat(running)
        response = running.post("/responses", {"input": "Remember this.", "max_output_tokens": 12})
        uninterrupted, _ = chat.next()
        running.with_keys(("b:key-a", "a:key-b"))  # the tenants have each other's keys now
        assert chat.next("key-b")[0] == uninterrupted and chat.next("key-a")[0] != uninterrupted
        asked = {"input": "More.", "max_output_tokens": 12, "previous_response_id": response["id"]}
        assert [running.post("/responses", asked, key)["status"] for key in ("key-a", "key-b")] == [400, 200]


@pytest.mark.slow
def test_without_a_state_path_the_answer_is_encoded_again(tmp_path):
    """So that the tests above can fail."""
    with served("") as running:
        chat = Chat(running)
        uninterrupted, _ = chat.next()
        running.restart_all()
        assert chat.next()[0] != uninterrupted


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_router_that_is_killed_at_any_moment_loses_at_most_what_it_had_no_time_to_write(tmp_path):
    """The next turn works in any case: with the ids that were generated, or with those of its text."""
    rng, exact = random.Random(0), 0
    with served(tmp_path) as running:
        for _ in range(20):
            chat = Chat(running)
            delay = rng.random() * 0.2
            running.restart_router(delay)
            ids, hit = chat.next()
            is_exact = ids[: len(chat.computed)] == chat.computed
            assert is_exact or delay < WRITTEN_SECONDS
            assert hit >= len(chat.computed) - 12 - 1
            exact += is_exact
        assert exact >= 5
