"""What a body may hold: it is bounded before it is parsed, and what follows leaves others served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from radixrt.frontend.generate import generation
from radixrt.frontend.http import body as limits
from radixrt.frontend.http._shape import exceeded
from radixrt.frontend.openai.schema import Chat
from tests.frontend.conftest import serving
from tests.waiting import eventually

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
HELLO = {"role": "user", "content": "hi"}
SMALL = (8, 20, 10, 4)
"""Limits of depth, values, numbers and entries."""


def many(item: str, count: int) -> str:
    return "[" + ",".join([item] * count) + "]"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": "b"}', None),
        ('{"messages": [{}, {}, {}, {}]}', None),
        ('{"messages": [{}, {}, {}, {}, {}]}', ("entries", "messages")),
        ('{"model": "m", "messages": [{"content": [{}, [], {}, {}, {}]}]}', ("entries", "messages.content")),
        ('{"a": {"b": {}}, "tools": ' + "[" * 8, ("depth", "tools")),
        ('{"a": ' + "[" * 7 + "]" * 7 + "}", None),
        ('{"a": ["x", "x"], "stop": ' + many('"x"', 13) + "}", None),
        ('{"a": ["x", "x"], "stop": ' + many('"x"', 14) + "}", ("values", "stop")),
        ('{"x": {' + ",".join(f'"k{i}": 1' for i in range(9)) + "}}", None),
        ('{"x": {' + ",".join(f'"k{i}": 1' for i in range(20)) + "}}", ("numbers", "x.k10")),
        ('{"ids": ' + many("-1.5e+7", 10) + "}", None),
        ('{"ids": ' + many("-1.5e+7", 11) + "}", ("numbers", "ids")),
        ('{"ids": ' + many("null", 11) + "}", ("numbers", "ids")),
        ('{"code": "' + '{[,:]}' * 100 + '", "more": "' + '\\"{[' * 100 + '"}', None),
        ('{"code": "' + "\\\\" * 99 + '", "ids": ' + many("1", 11) + "}", ("numbers", "ids")),
        ('{"größe": ' + many("1", 11) + "}", ("numbers", "größe")),
        ('{"' + "k" * 100 + '": ' + many("1", 11) + "}", ("numbers", "k" * 64)),
        (many("{}", 5), ("entries", "")),
        ("]]]}}}" + many("{}", 5), ("entries", "")),
        ('{"open": "' + "x" * 100, None),
        ("", None),
    ],
)  # fmt: skip
def test_the_first_limit_that_json_exceeds_and_its_field(text, found):
    assert exceeded(text.encode(), *SMALL) == found


def test_limits_of_a_body_allow_what_agents_send():
    code = 'if (x) {\n\treturn {"a": [1, 2], "b": "\\"}"};\n}\n' * 20_000
    calls = [{"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}} for i in range(8)]
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": [{"type": "text", "text": "x"}]} for i in range(8)]
    turns = [HELLO, {"role": "assistant", "content": None, "tool_calls": calls}, *results] * 600
    properties = {f"p{i}": {"type": "string", "description": "x", "enum": ["a", "b"]} for i in range(40)}
    function = {"name": "f", "parameters": {"type": "object", "properties": properties, "required": [*properties]}}
    body = {
        "messages": [HELLO | {"content": code}, *turns],
        "tools": [{"type": "function", "function": function}] * 200,
    }
    given = (limits.MAX_DEPTH, limits.MAX_VALUES, limits.MAX_NUMBERS, limits.MAX_ENTRIES)
    assert exceeded(json.dumps(body).encode(), *given) is None
    assert exceeded(json.dumps({"prompt": [[7] * 1000] * 1000}).encode(), *given) is None


HOSTILE = {
    "messages": (CHAT, '{"messages": ' + many('{"role":"user","content":"x"}', 200_000) + "}"),
    "messages.content": (CHAT, '{"messages": [{"role":"user","content":' + many("{}", 30_000) + "}]}"),
    "tools": (CHAT, '{"messages": [], "tools": ' + many("{}", 50_000) + "}"),
    "metadata": (RESPONSES, '{"input": "x", "metadata": ' + many('"x"', 300_000) + "}"),
    "input": (RESPONSES, '{"input": ' + many("{}", 50_000) + "}"),
    "system": (MESSAGES, '{"messages": [], "system": ' + many("{}", 50_000) + "}"),
    "prompt": (COMPLETIONS, '{"prompt": ["", ' + ",".join(["7"] * 1_100_000) + "]}"),
    "tokens": ("/detokenize", '{"tokens": ' + many("7", 1_100_000) + "}"),
    "prompt.messages": ("/v1/native", '{"type": "generate", "prompt": {"messages": ' + many("{}", 50_000) + "}}"),
    "stop": (CHAT, '{"messages": [], "stop": "' + "x" * 70_000 + '", "stop": ' + "[" * 300 + "]" * 300 + "}"),
}


@pytest.mark.parametrize(("field", "path", "text"), [(field, *one) for field, one in HOSTILE.items()], ids=HOSTILE)
def test_a_body_that_holds_too_much_is_refused_unparsed_and_its_field_is_named(url, field, path, text):
    answer = httpx.post(url + path, content=text.encode(), headers={"content-type": "application/json"}, timeout=30)
    assert answer.status_code == 400, answer.text
    error = answer.json() if path == "/v1/native" else answer.json()["error"]
    assert error["message"].startswith(f"{field}: ") and "more than" in error["message"]
    if path not in ("/v1/native", MESSAGES):
        assert error["param"] == field


def test_ids_of_a_prompt_are_not_counted(url):
    """They are read without a parser."""
    answer = httpx.post(url + COMPLETIONS, json={"prompt": [7] * 1_200_000, "max_tokens": 1}, timeout=30)
    assert answer.json()["error"]["message"].startswith("the prompt is too long: 1200000 tokens")


class Stalls:
    """The longest time in which a server answered nobody else, in seconds."""

    def __init__(self, url: str) -> None:
        self._url, self._stop, self.longest = url, threading.Event(), 0.0
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        with httpx.Client(base_url=self._url) as client:
            while not self._stop.is_set():
                began = time.perf_counter()
                client.get("/version")
                self.longest = max(self.longest, time.perf_counter() - began)

    def __enter__(self) -> Stalls:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [HELLO] * 16_000},
        {"messages": [HELLO], "tools": [
            {"type": "function", "function": {"name": f"f{i}", "parameters": {"properties": {
                f"p{j}": {"type": "string"} for j in range(40)}}}} for i in range(1000)]},
        {"messages": [HELLO | {"content": [{"type": "text", "text": "x"}] * 10_000}] * 4},
        {"messages": [HELLO], "logit_bias": {str(i): 1 for i in range(120_000)}},
    ],
    ids=["messages", "tools", "parts", "logit_bias"],
)  # fmt: skip
def test_others_are_served_while_the_largest_bodies_are_read(url, fields):
    content = json.dumps(fields | {"max_tokens": 1, "top_p": 7}).encode()  # refused after all of it is read
    with Stalls(url) as others:
        answer = httpx.post(url + CHAT, content=content, timeout=60)
    assert answer.status_code == 400 and others.longest < 1.0, (
        "a busy machine takes several times as long as a free one"
    )


@pytest.mark.parametrize("size", [10, 100_000])
def test_what_follows_from_a_large_body_is_computed_in_a_thread(url, monkeypatch, size):
    threads = []
    for name in ("tool_use", "prompts", "sampling"):
        own = getattr(Chat, name)
        monkeypatch.setattr(
            Chat, name, lambda *args, own=own: threads.append(threading.current_thread().name) or own(*args)
        )
    answer = httpx.post(url + CHAT, json={"messages": [HELLO], "max_tokens": 1, "user": "x" * size}, timeout=30)
    assert answer.status_code == 200
    assert [name != "frontend" for name in threads] == [size > limits.MIN_BYTES] * 3, threads


@pytest.mark.parametrize("key", ["", "wrong"])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", path) for path in (
        CHAT, COMPLETIONS, MESSAGES, RESPONSES, RESPONSES + "/input_tokens", MESSAGES + "/count_tokens", "/tokenize",
        "/detokenize", "/v1/native", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/reset_prefix_cache",
    )] + [("GET", "/metrics"), ("GET", "/v1/report"), ("GET", "/v1/models"), ("DELETE", RESPONSES + "/x")],
)  # fmt: skip
def test_the_body_of_a_request_without_a_known_key_is_not_read(keyed, method, path, chunked, key):
    """Its first bytes, in which a native message may have its key, excepted."""
    host, port = keyed.removeprefix("http://").split(":")
    size = "Transfer-Encoding: chunked" if chunked else "Content-Length: 30000000"
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", size, f"X-Api-Key: {key}" if key else "X: y"]
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall("\r\n".join([*lines, "", ""]).encode())
        if path in ("/v1/native", "/v1/load_lora_adapter", "/v1/unload_lora_adapter") and chunked:
            sock.sendall(b"2400\r\n" + b"[" * 0x2400 + b"\r\n")  # more than the first bytes
        assert sock.recv(65536).split(b" ")[1] == b"401"


@pytest.fixture(scope="module")
def keyed(folder) -> Any:
    with serving(folder, workers=1, api_key=("t:known",)) as frontend:
        yield frontend.url


def test_bodies_of_a_tenant_are_bounded_together(keyed, monkeypatch):
    """Also those of which a part is still to come. One may be as large as a body may be."""
    monkeypatch.setattr(limits, "MAX_TENANT_BYTES", 500_000)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: known\r\nContent-Length: %d\r\n\r\n"
    key, large = {"x-api-key": "known"}, {"prompt": "a", "max_tokens": 1, "user": "x" * 600_000}
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", httpx.URL(keyed).port))) for _ in "abcd"]
        for client in clients:
            client.sendall(head % 200_000 + b" " * 199_999)
        refused, *_ = select.select(clients, [], [], 10)[0]
        assert refused.recv(1 << 16).startswith(b"HTTP/1.1 429")
        assert httpx.post(keyed + COMPLETIONS, headers=key, json=large).status_code == 429
    eventually(lambda: httpx.post(keyed + COMPLETIONS, headers=key, json=large).status_code == 200)


def test_a_client_that_goes_on_sending_after_its_answer_is_cut_off(keyed):
    """It is not read for ever, but for as long as an honest one may need to see the answer."""
    host, port = keyed.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        chunk = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 200:
                sock.sendall(chunk)
                sent += 1
        assert 16 <= sent < 100


# ---------------------------------------------------------------- many choices, repeated prompts


def test_prompts_that_are_answered_before_all_are_sent(url, monkeypatch):
    monkeypatch.setattr(generation, "MAX_AT_ONCE", 1)
    monkeypatch.setattr(generation, "asyncio", SimpleNamespace(sleep=lambda _: asyncio.sleep(0.05)))
    body = {"prompt": ["a b"] * 5, "max_tokens": 2, "stream": True}
    lines = [line for line in httpx.post(url + COMPLETIONS, json=body, timeout=30).text.split("\n") if line]
    assert sum('"finish_reason":"length"' in line for line in lines) == 5
    assert lines.index("data: [DONE]") == len(lines) - 1


def test_many_prompts_are_answered_each(url):
    answer = httpx.post(url + COMPLETIONS, json={"prompt": ["a b"] * 100, "n": 2, "max_tokens": 2}, timeout=30).json()
    assert [choice["index"] for choice in answer["choices"]] == [*range(200)]
    assert answer["usage"]["completion_tokens"] == 400


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": ["a"] * 1000, "n": 5}, "n"),
        ({"prompt": [7] * 40_000, "n": 100, "echo": True}, "echo"),
        ({"prompt": [7] * 40_000, "n": 100, "return_token_ids": True}, "return_token_ids"),
        ({"prompt": [7] * 3_000, "echo": True, "logprobs": 1, "stream": True}, "echo"),
    ],
)
def test_what_a_request_makes_of_little_is_bounded(wide_url, fields, field):
    answer = httpx.post(wide_url + COMPLETIONS, json={"max_tokens": 1} | fields, timeout=30)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field


@pytest.fixture(scope="module")
def wide_url(folder) -> Any:
    with serving(folder, workers=1, context=1 << 17) as frontend:
        yield frontend.url
