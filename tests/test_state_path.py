"""kill -9 and a restart: with --state-path the next turn of every kind of conversation has the token ids that it would
have had without, and so hits to the last token what a worker has kept."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from radixrt.client import Client
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.lang import Branch, assistant, gen, program, user
from radixrt.launch.launcher import Stack
from radixrt.messages import Sampling
from radixrt.process.ports import free_tcp_address
from radixrt.process.subprocesses import stop_subprocesses
from tests.waiting import eventually

WRITTEN_SECONDS = 0.3
"""After which an answer is on disk, with room to spare."""
TWELVE = Sampling(max_tokens=12, ignore_eos=True)
KEYS = ("a:key-a", "b:key-b")


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

    def restart_router(self) -> None:
        """kill -9 the router, with the front end in it; the worker keeps its pages."""
        time.sleep(WRITTEN_SECONDS)
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


# ---------------------------------------------------------------- conversations, each in two turns


class Chat:
    """Over HTTP; the assistant's message is sent back as text."""

    def __init__(self, to: Served, **fields: Any) -> None:
        self._to, self._messages, self._fields = to, [{"role": "user", "content": "How are things in Paris?"}], fields
        self._answer = self._ask()
        message = self._answer["choices"][0]["message"]
        self._messages += [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": "More."}]

    def _ask(self, key: str = "key-a") -> dict[str, Any]:
        body = {"messages": self._messages, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
        return self._to.post("/chat/completions", body | self._fields, key)

    def computed(self) -> list[int]:
        choice = self._answer["choices"][0]
        ids = choice["prompt_token_ids"] if "prompt_token_ids" in choice else self._answer["prompt_token_ids"]
        return [*ids, *choice["token_ids"]]

    def next(self, key: str = "key-a") -> tuple[list[int], int]:
        """The prompt of the second turn, and how much of it was cached."""
        answer = self._ask(key)
        choice = answer["choices"][0]
        ids = choice["prompt_token_ids"] if "prompt_token_ids" in choice else answer["prompt_token_ids"]
        return ids, cached(answer)


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("state")) as one:
        yield one


def test_the_next_turn_after_a_killed_router_hits_all_that_was_computed(running):
    chat = Chat(running)
    response = running.post("/responses", {"input": "Remember this.", "max_output_tokens": 12})
    second = running.post(
        "/responses", {"input": "And this.", "max_output_tokens": 12, "previous_response_id": response["id"]}
    )
    with running.client() as client:
        asked = [{"role": "user", "content": "What do you see?"}]
        first = client.generate(asked, TWELVE)
    expected = chat.computed()

    running.restart_router()

    ids, hit = chat.next()
    assert ids[: len(expected)] == expected and hit == len(expected) - 1, "of a chat whose answers are sent back"
    third = running.post(
        "/responses", {"input": "More.", "max_output_tokens": 12, "previous_response_id": second["id"]}
    )
    assert third["status"] == 200 and cached(third) == second["usage"]["total_tokens"] - 1, "of stored responses"
    asked += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And now?"}]
    with running.client() as client:
        more = client.generate(asked, TWELVE)
    assert more.usage.cached_tokens == first.usage.prompt_tokens + 12 - 1, "of a chat of the native client"


def test_a_program_goes_on_from_its_state_after_a_killed_router(running):
    said = []

    @program
    async def talk(s: Branch) -> None:
        s += user("Tell me a story.") + assistant(gen("one", max_tokens=12, ignore_eos=True))
        await s["one"]
        first = (await s.usage("one")) if hasattr(s, "usage") else None
        said.append(first)
        running.restart_router()
        s += user("Go on.") + assistant(gen("two", max_tokens=12, ignore_eos=True))
        await s["two"]

    with running.client() as client:
        trace = talk.run(client)
        print(trace, dir(trace))
