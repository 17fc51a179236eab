"""max_tokens beyond what the context leaves, as agents send it: the answer may be as long as there is room, and says
so."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from radixrt.client import Client
from radixrt.messages import Sampling
from tests.frontend.conftest import serving

CONTEXT = 300
MESSAGES = [{"role": "user", "content": "hello"}]
ENDLESS = {"ignore_eos": True}
APIS = {
    "/v1/completions": {"prompt": [5, 6, 7], "max_tokens": 32_000, **ENDLESS},
    "/v1/chat/completions": {"messages": MESSAGES, "max_completion_tokens": 32_000, **ENDLESS},
    "/v1/responses": {"input": "hello", "max_output_tokens": 32_000, **ENDLESS},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 32_000, **ENDLESS},
    "/api/chat": {"messages": MESSAGES, "options": {"num_predict": 32_000}, **ENDLESS},
    "/api/generate": {"prompt": "hello", "options": {"num_predict": 32_000}, **ENDLESS},
}
"""Path and body, as Claude Code asks: it wants 32,000 tokens at any length of its context."""


@pytest.fixture(scope="module", params=["router", "front end"])
def http(request, folder) -> Iterator[httpx.Client]:
    """A server with so long a context, whoever knows of it."""
    lengths = {"context": CONTEXT} if request.param == "router" else {"max_model_len": CONTEXT}
    with serving(folder, workers=1, **lengths) as frontend, httpx.Client(base_url=frontend.url, timeout=30) as client:
        yield client


def sizes(body: dict) -> tuple[int, int]:
    """(prompt tokens, generated tokens) by the usage of any API."""
    usage = body.get("usage") or {}
    prompt = usage.get("prompt_tokens", usage.get("input_tokens", body.get("prompt_eval_count")))
    prompt += usage.get("cache_read_input_tokens", 0) + usage.get("cache_creation_input_tokens", 0)
    return prompt, usage.get("completion_tokens", usage.get("output_tokens", body.get("eval_count")))


@pytest.mark.parametrize("path", APIS)
def test_an_answer_has_as_many_tokens_as_there_is_room_for_and_says_so(http, path):
    answer = http.post(path, json={"model": "m", "stream": False} | APIS[path])
    assert answer.status_code == 200, answer.text
    body = answer.json()
    prompt, generated = sizes(body)
    assert body["radixrt"]["max_tokens"] == CONTEXT - prompt >= generated
    if path != "/v1/responses" and not path.startswith("/api"):  # these do not know ignore_eos
        assert generated == CONTEXT - prompt


@pytest.mark.parametrize("path", APIS)
def test_a_stream_says_so_at_its_end(http, path):
    with http.stream("POST", path, json={"model": "m", "stream": True} | APIS[path]) as answer:
        lines = [line.removeprefix("data:") for line in answer.iter_lines() if line and not line.startswith("event:")]
    events = [json.loads(line) for line in lines if line.strip() != "[DONE]"]
    (said,) = {about["max_tokens"] for event in events if (about := find(event, "radixrt"))}
    assert 0 < said < CONTEXT


def find(value, name: str):
    """The field of that name, at any depth."""
    if isinstance(value, dict):
        return value.get(name) or next((found for one in value.values() if (found := find(one, name))), None)
    return None


@pytest.mark.parametrize("path", APIS)
def test_nothing_is_said_where_there_is_room(http, path):
    body = json.loads(json.dumps({"model": "m", "stream": False} | APIS[path]).replace("32000", "20"))
    answer = http.post(path, json=body)
    assert answer.status_code == 200 and "max_tokens" not in answer.json()["radixrt"]


def test_a_full_context_is_named_as_the_apis_do(http):
    def ask(path: str) -> dict:
        return http.post(path, json={"model": "m", "stream": False} | APIS[path]).json()

    assert ask("/v1/messages")["stop_reason"] == "model_context_window_exceeded"
    assert ask("/v1/chat/completions")["choices"][0]["finish_reason"] == "length"


def test_the_usage_of_the_native_api_says_so(folder):
    with serving(folder, workers=1, context=CONTEXT) as frontend:
        with Client(frontend.url) as client:
            done = client.generate([5, 6, 7], Sampling(max_tokens=32_000, ignore_eos=True))
            assert (done.usage.max_tokens, done.usage.completion_tokens) == (CONTEXT - 3, CONTEXT - 3)
            unset = client.generate([5, 6, 7], Sampling(max_tokens=None, ignore_eos=True)).usage
            assert not isinstance(unset.max_tokens, int), "nothing else was asked for"
