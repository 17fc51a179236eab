"""Texts with half of a surrogate pair, as clients send them that cut a text between two UTF-16 units."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from radixrt.client import Client, ServerError
from radixrt.messages import ChatPrompt, Sampling, TextPrompt

HALF = "a \ud83d"
HELLO = {"role": "user", "content": "hello"}
CUT = {"role": "user", "content": HALF}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": HALF}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"x": HALF}}]}
OUTPUT = {"type": "function_call", "call_id": "a", "name": "f", "arguments": HALF}
ARGUMENTS = "messages[1].tool_calls[0].function.arguments"
REQUESTS: list[tuple[str, dict[str, Any], str]] = [
    ("v1/chat/completions", {"messages": [HELLO, CUT]}, "messages[1].content"),
    ("v1/chat/completions", {"messages": [HELLO, CALLED]}, ARGUMENTS),
    ("v1/completions", {"prompt": HALF}, "prompt"),
    ("v1/messages", {"messages": [CUT], "max_tokens": 1}, "messages.0.content"),
    ("v1/messages", {"messages": [HELLO, USE], "max_tokens": 1}, "messages.1.content.0.input.x"),
    ("v1/responses", {"input": HALF}, "input"),
    ("v1/responses", {"input": [HELLO, OUTPUT]}, "input[1].arguments"),
    ("api/chat", {"messages": [HELLO, CUT]}, "messages[1].content"),
    ("api/generate", {"prompt": HALF}, "prompt"),
]


@pytest.mark.parametrize(("path", "body", "field"), REQUESTS, ids=[f"{path}-{field}" for path, _, field in REQUESTS])
def test_a_lone_surrogate_is_refused_by_its_field(url, path, body, field):
    content = json.dumps({"model": "m"} | body)
    answer = httpx.post(f"{url}/{path}", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and f"{field}: holds a lone surrogate" in answer.text


def test_a_pair_is_a_character(url):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "a 😀"}], "max_tokens": 1})
    assert "\\ud83d\\ude00" in body
    answer = httpx.post(f"{url}/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (ChatPrompt([HELLO, CUT]), "messages[1].content"),
        (ChatPrompt([HELLO, CALLED]), ARGUMENTS),
        (TextPrompt(HALF), ""),
    ],
)
def test_native_clients_are_told_as_well(url, prompt, field):
    with Client(url) as client, pytest.raises(ServerError, match="holds a lone surrogate") as caught:
        client.generate(prompt, Sampling(max_tokens=1))
    assert caught.value.code == 400 and caught.value.field == (field or "text")
