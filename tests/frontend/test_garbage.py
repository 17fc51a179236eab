"""What requests leave to the cyclic collector, which seldom comes: nothing, and so no body."""

from __future__ import annotations

import contextlib
import gc
import json
import socket
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from radixrt.frontend.server import FrontendThread
from tests.frontend.conftest import serving

TEXT = "dog " * 5_000
CHAT = [{"role": "user", "content": TEXT}]
NATIVE = {"type": "generate", "id": 1, "sampling": {"max_tokens": 1}}
KEY, HEADER = "key", {"x-api-key": "key"}
MODULES = ("radixrt.", "uvicorn.", "starlette.")


@pytest.fixture(scope="module")
def frontend(folder) -> Iterator[FrontendThread]:
    with serving(folder, workers=1, context=2_000, max_body_bytes=60_000, api_key=(f"t:{KEY}",)) as running:
        yield running


@contextlib.contextmanager
def kept() -> Iterator[list[Any]]:
    """Of what a server is made of, or an exception refers to: what the collector finds of the block."""
    found: list[Any] = []
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
    finally:
        gc.set_debug(0)
        gc.enable()
        for one in gc.garbage:
            if isinstance(one, FrameType | BaseException) or type(one).__module__.startswith(MODULES):
                found.append(one.f_code.co_name if isinstance(one, FrameType) else type(one))
        gc.garbage.clear()


class Wire:
    """A connection to a front end."""

    def __init__(self, frontend: FrontendThread) -> None:
        self._state = frontend._server.server_state
        self._socket = socket.create_connection(("127.0.0.1", int(frontend.url.rpartition(":")[2])))

    def ask(self, path: str, body: bytes, headers: dict[str, str] = HEADER, length: int | None = None) -> None:
        size = len(body) if length is None else length
        lines = [f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {size}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode() + body)

    def status(self) -> int:
        answer = b""
        while not answer.endswith((b"}", b"}\n", b"\n0\r\n\r\n")):
            assert (part := self._socket.recv(65536)), answer
            answer += part
        return int(answer.split()[1])

    def close(self) -> None:
        """Return when the server has seen it."""
        self._socket.close()
        deadline = time.monotonic() + 10
        while self._state.connections or self._state.tasks:
            assert time.monotonic() < deadline
            time.sleep(0.005)


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": TEXT} | fields


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": CHAT, "max_tokens": 1} | fields


def native(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/native", NATIVE | fields


REFUSED = {
    "too long": completion(),
    "a stream that is too long": completion(stream=True),
    "too many tokens": completion(prompt=[5] * 2_000),
    "bad max_tokens": completion(max_tokens=-1),
    "a bad type": completion(max_tokens="x"),
    "a bad grammar": chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 3}}}),
    "a chat that is too long": chat(),
    "a chat with a bad field": chat(top_p=7),
    "what the template has": chat(chat_template_kwargs={"messages": TEXT}),
    "a message": ("/v1/messages", {"model": "m", "max_tokens": 1, "messages": CHAT}),
    "a stream of a message": ("/v1/messages", {"model": "m", "max_tokens": 1, "messages": CHAT, "stream": True}),
    "a bad message": ("/v1/messages", {"model": "m", "max_tokens": 1, "messages": CHAT, "thread": {"type": TEXT}}),
    "tokens of a bad message": ("/v1/messages/count_tokens", {"messages": CHAT, "cache_control": {"type": "x"}}),
    "lines of a message": ("/api/chat", {"messages": CHAT}),
    "a bad question": ("/api/generate", {"prompt": TEXT, "format": TEXT, "stream": False}),
    "a response": ("/v1/responses", {"input": TEXT}),
    "a response that goes on from none": ("/v1/responses", {"input": TEXT, "previous_response_id": "x"}),
    "a response with a bad tool": ("/v1/responses", {"input": TEXT, "tools": [{"type": "x"}]}),
    "native, too long": native(prompt={"type": "text", "text": TEXT}),
    "native, a bad field": native(prompt={"type": "text", "text": TEXT}, sampling={"top_p": 7}),
    "native, none": native(type="dance", prompt={"type": "text", "text": TEXT}),
    "native, a cancel": native(type="cancel", prompt=TEXT),
    "tokens of nothing": ("/tokenize", {"prompt": TEXT, "messages": CHAT}),
    "text of no tokens": ("/detokenize", {"tokens": [1 << 30] * 5_000}),
    "no route": ("/v1/nothing", {"prompt": TEXT}),
}
WHOLE = {name: (path, json.dumps(body).encode()) for name, (path, body) in REFUSED.items()} | {
    "no JSON": ("/v1/completions", b"{" + TEXT.encode()),
    "native, no JSON": ("/v1/native", b"{" + TEXT.encode()),
    "too large": ("/v1/completions", b"x" * 61_000),
}


@pytest.mark.parametrize(("path", "body"), WHOLE.values(), ids=WHOLE)
def test_what_is_refused_is_not_kept(frontend, path, body):
    def refused() -> None:
        wire = Wire(frontend)
        for _ in range(2):
            wire.ask(path, body)
            assert 400 <= wire.status() < 500
        wire.close()

    refused()  # the first of a kind may import what it needs
    with kept() as found:
        refused()
    assert not found


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_chat_that_the_template_refuses_is_not_kept(folder, tmp_path, path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ raise_exception('of no use') }}{% endfor %}")
    body = {"messages": CHAT, "max_tokens": 1, "model": "m"}
    with serving(folder, workers=1, context=200_000, chat_template=str(template)) as refusing:
        for _ in range(2):
            with kept() as found:
                wire = Wire(refusing)
                wire.ask(path, json.dumps(body).encode())
                assert wire.status() == 400
                wire.close()
    assert not found


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/native"])
def test_what_is_refused_for_its_key_is_not_kept(frontend, path):
    with kept() as found:
        wire = Wire(frontend)
        wire.ask(path, b"x" * 61_000, {"x-api-key": "wrong"})
        assert wire.status() == 401
        wire.close()
    assert not found


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/responses", "/v1/native", "/v1/nothing"])
def test_a_client_that_leaves_in_a_body_leaves_nothing(frontend, path):
    with kept() as found:
        wire = Wire(frontend)
        wire.ask(path, TEXT.encode(), length=50_000)
        wire.close()
    assert not found


@pytest.mark.parametrize("stream", [True, False])
def test_what_is_answered_or_left_leaves_nothing(folder, stream):
    body = {"prompt": "dog " * 100, "ignore_eos": True, "stream": stream}
    with serving(folder, fake="0,0.001", workers=1) as frontend:
        for _ in range(2):
            with kept() as found:
                wire = Wire(frontend)
                for path in ("/v1/completions", "/v1/nothing"):
                    wire.ask(path, json.dumps(body | {"max_tokens": 3}).encode())
                    assert wire.status() == (200 if path == "/v1/completions" else 404)
                wire.ask("/v1/completions", json.dumps(body | {"max_tokens": 300}).encode())
                for _ in range(3):  # they wait behind it
                    wire.ask("/v1/completions", json.dumps(body | {"max_tokens": 1}).encode())
                time.sleep(0.05)
                wire.close()
            assert not found
