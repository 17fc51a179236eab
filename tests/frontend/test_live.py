"""The data of the live page: who sees what, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.frontend.conftest import serving

KEYS = {"alpha": "key-of-alpha", "beta": "key-of-beta", "admin": "key-of-admin"}


@pytest.fixture(scope="module")
def keyed(folder) -> Iterator[str]:
    """The URL of a front end of two tenants and an admin."""
    keys = ("alpha:key-of-alpha", "beta:key-of-beta")
    with serving(folder, api_key=keys, admin_api_key=KEYS["admin"]) as frontend:
        yield frontend.url


def headers(who: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[who]}"}


def complete(url: str, who: str, prompt: str, **fields) -> dict:
    body = {"model": "m", "prompt": prompt, "max_tokens": 3, "ignore_eos": True} | fields
    own = headers(who) | {"x-radixrt-program": f"program-of-{who}"}
    return httpx.post(f"{url}/v1/completions", json=body, headers=own).raise_for_status().json()


def events(url: str, who: str, count: int) -> list[tuple[str, dict]]:
    """The first events of a stream."""
    found = []
    with httpx.stream("GET", f"{url}/v1/live", headers=headers(who), timeout=10) as stream:
        assert stream.status_code == 200 and stream.headers["content-type"].startswith("text/event-stream")
        for line in stream.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                found.append((name, json.loads(line.removeprefix("data: "))))
            if len(found) == count:
                return found
    raise AssertionError("the stream has ended")


def state(url: str, who: str) -> dict:
    return events(url, who, 2)[1][1]


def test_a_stream_begins_with_the_history_and_the_state_and_goes_on(keyed):
    complete(keyed, "alpha", "a b c d e f g h")
    (first, history), (second, now), (third, later) = events(keyed, "alpha", 3)
    assert (first, second, third) == ("history", "state", "state") and later["time"] > now["time"]
    assert now["tenant"] == "alpha" and not now["admin"]
    (one,) = now["recent"]
    assert one["prompt"] == now["totals"]["prompt_tokens"] == sum(point[1] for point in history["points"])
    assert one["end"] == "length" and one["generated"] == 3 and one["program"] == "program-of-alpha"
    why = httpx.get(f"{keyed}/v1/live/requests/{one['id']}", headers=headers("alpha")).json()
    assert why["misses"] == one["misses"] and why["sentences"]


@pytest.mark.parametrize("path", ["", "/requests/1", "/tree", "/tree/1"])
def test_a_key_that_is_none_gets_nothing(keyed, path):
    assert httpx.get(f"{keyed}/v1/live{path}", headers={"authorization": "Bearer none"}).status_code == 401
