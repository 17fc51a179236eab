"""Fields that requests of all APIs share: each one's reaches the worker, and is refused in the API's own format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from radixrt.client import Client
from radixrt.messages import Run, Sampling
from radixrt.worker import loop
from tests.frontend.conftest import serving

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/chat/completions": CHAT | {"max_completion_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
    "/v1/messages": CHAT | {"model": "m", "max_tokens": 2},
    "/api/chat": CHAT | {"options": {"num_predict": 2}},
}
SHARED = {"temperature": 0.5, "top_k": 7, "min_p": 0.25, "seed": 3, "presence_penalty": 1.0, "min_tokens": 1}
MORE = {"stop_token_ids": [9], "logit_bias": {"8": 1.0}, "allowed_token_ids": [7, 8, 9], "ignore_eos": True}


@pytest.fixture(scope="module")
def url(folder) -> Iterator[str]:
    with serving(folder, workers=1) as frontend:
        yield frontend.url


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """What the worker gets."""
    found: list[Run] = []
    from_run = loop.from_run
    monkeypatch.setattr(loop, "from_run", lambda run, *args: found.append(run) or from_run(run, *args))
    return found


@pytest.mark.parametrize("path", BODIES)
def test_a_shared_field_reaches_the_worker_from_each_api(url, runs, path):
    answer = httpx.post(url + path, json=BODIES[path] | SHARED | MORE | {"priority": -7})
    assert answer.status_code == 200, answer.text
    (run,) = runs
    assert run.priority == -7 and run.sampling.max_tokens == 2
    sampled = [getattr(run.sampling, name) for name in (*SHARED, *MORE)]
    assert sampled == [*SHARED.values(), (9,), {8: 1.0}, (7, 8, 9), True]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("priority", [1 << 31, -(1 << 31) - 1, 0.5, "soon"])
def test_a_priority_out_of_range_is_refused_in_the_apis_format(url, path, priority):
    answer = httpx.post(url + path, json=BODIES[path] | {"priority": priority})
    error = answer.json()["error"]
    if path == "/api/chat":  # its errors are texts
        error = {"type": "invalid_request_error", "message": error}
    assert answer.status_code == 400 and error["type"] == "invalid_request_error", answer.text
    assert error.get("param", "priority") == "priority" and "priority" in error["message"]


def test_a_client_passes_a_priority_on(url, runs):
    """Over HTTP, by the native API."""
    with Client(url) as client:
        client.generate("hello", Sampling(max_tokens=1), priority=4)
        list(client.stream("hello", Sampling(max_tokens=1), priority=5))
        client.score("hello", ["a"], priority=6)
    assert [run.priority for run in runs] == [4, 5, 6]
