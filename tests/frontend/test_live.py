"""The data of the live page: who sees what, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from radixrt import cli
from radixrt.client.transports import NATIVE_PATH
from radixrt.router.server import live
from tests.frontend.conftest import serving

KEYS = {"alpha": "key-of-alpha", "beta": "key-of-beta", "admin": "key-of-admin"}


@pytest.fixture(scope="module")
def keyed(folder) -> Iterator[str]:
    """The URL of a front end of two tenants and an admin, where nothing that is shown is older than the question."""
    keys = ("alpha:key-of-alpha", "beta:key-of-beta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "KEPT_SECONDS", 0.0)
        patch.setattr(live, "MIN_OUTLINE_SECONDS", 0.0)
        patch.setattr(live, "MAX_OUTLINE_SHARE", 1e9)
        patch.setattr(live, "MAX_TENANT_SHARE", 1e9)
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
    assert why["misses"] == one["misses"] and "no earlier prompt begins so" in why["sentences"][-1]


@pytest.mark.parametrize("path", ["", "/requests/1", "/tree", "/tree/1"])
def test_a_key_that_is_none_gets_nothing(keyed, path):
    assert httpx.get(f"{keyed}/v1/live{path}", headers={"authorization": "Bearer none"}).status_code == 401


SECRET = "an uncommon sentence of alpha, about elephants and aqueducts"


def test_a_tenant_sees_nothing_of_another(keyed):
    complete(keyed, "alpha", SECRET)
    for text in ("my own words one", "my own words two"):
        complete(keyed, "beta", text)
    seen = {}
    for who in KEYS:
        now = state(keyed, who)
        tree = httpx.get(f"{keyed}/v1/live/tree", headers=headers(who)).json()
        texts = [httpx.get(f"{keyed}/v1/live/tree/{node[0]}", headers=headers(who)).json() for node in tree["nodes"]]
        whys = [httpx.get(f"{keyed}/v1/live/requests/{r['id']}", headers=headers(who)).json() for r in now["recent"]]
        seen[who] = now, tree, texts, whys
    told = json.dumps(seen["beta"])
    assert "own words" in told and "alpha" not in told and "elephants" not in told
    assert "elephants" in json.dumps(seen["admin"]) and "own words" in json.dumps(seen["admin"])
    own = {one["id"] for one in seen["beta"][0]["recent"]}
    nodes = {node[0] for node in seen["beta"][1]["nodes"]}
    others = {one["id"] for one in seen["admin"][0]["recent"]} - own
    assert own and others and nodes < {node[0] for node in seen["admin"][1]["nodes"]}
    paths = [f"requests/{id}" for id in others]
    for node in seen["admin"][1]["nodes"]:
        paths += [f"tree/{node[0]}", f"tree?root={node[0]}"] if node[0] not in nodes else []
    for path in paths:
        assert httpx.get(f"{keyed}/v1/live/{path}", headers=headers("beta")).status_code == 404, path
    now, tree = seen["beta"][:2]
    assert now["totals"]["requests"] == len(own) and [one["tenant"] for one in now["tenants"]] == ["beta"]
    assert tree["total"] == now["tenants"][0]["cached_tokens"] and now["tenants"][0]["share"] == 1
    assert all("running" not in worker for worker in now["workers"])


def test_text_with_a_salt_is_shown_to_nobody(keyed):
    for last in ("apricots", "blueberries"):
        complete(keyed, "beta", f"of one user of several: {last}", cache_salt="user 1")
    for who in ("beta", "admin"):
        now = state(keyed, who)
        why = httpx.get(f"{keyed}/v1/live/requests/{now['recent'][0]['id']}", headers=headers(who)).json()
        assert why["diverged"]["token"] > 0 and why["diverged"]["ours"] is None
        tree = httpx.get(f"{keyed}/v1/live/tree", headers=headers(who)).json()
        texts = [httpx.get(f"{keyed}/v1/live/tree/{node[0]}", headers=headers(who)).json() for node in tree["nodes"]]
        assert None in [one["text"] for one in texts]
        assert "one user" not in json.dumps([now, why, tree, texts])


ASKED = "Please count the ships in the harbour: "


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages", "/api/chat", "completions", "/generate"])
def test_an_answer_says_why_its_prompt_missed(url, path, stream):
    """The second request parts from the first one in its user's message."""
    told = [_explained(url, path, f"{path} {stream}", ship, stream) for ship in ("Erika", "Gorch Fock")]
    assert told[0]["diverged"] is None or told[0]["bound"] < told[1]["bound"]
    found = told[1]["diverged"]
    assert found["ours"].startswith("Gorch") and found["theirs"].startswith("Erika") and found["before"].endswith(": ")
    assert found["token"] == told[1]["bound"] and told[1]["misses"]["never_seen"] > 0 and len(told[1]["sentences"]) > 1
    if "completions" != path != "/generate":
        assert (found["message"], found["role"]) == (1, "user")


def _explained(url: str, path: str, system: str, ship: str, stream: bool) -> dict:
    text = ASKED + ship
    chat = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    body = {"model": "m", "stream": stream}
    more = {
        "chat/completions": {"messages": chat, "max_tokens": 2},
        "responses": {"input": chat, "max_output_tokens": 2},
        "messages": {"system": system, "messages": chat[1:], "max_tokens": 2},
        "/api/chat": {"messages": chat, "options": {"num_predict": 2}},
        "completions": {"prompt": system + text, "max_tokens": 2},
        "/generate": {
            "type": "generate",
            "id": 1,
            "prompt": {"type": "text", "text": system + text},
            "sampling": {"max_tokens": 2},
        },
    }[path]
    path = path if path.startswith("/") else f"/v1/{path}"
    if path == "/generate":
        path = NATIVE_PATH
        del body["model"]
    answer = httpx.post(url + path, json=body | more, headers={"x-radixrt-explain": "1"}).raise_for_status()
    found = [line for line in answer.text.splitlines() if '"diverged"' in line]
    assert len(found) == 1, answer.text
    line = json.loads(found[0].removeprefix("data: "))
    if path == NATIVE_PATH:
        return line["items"][0][5]["explain"]
    return line.get("response", line)["radixrt"]["explain"]


def test_nothing_is_explained_unasked(url):
    body = {"model": "m", "prompt": "some words", "max_tokens": 2}
    assert "explain" not in httpx.post(f"{url}/v1/completions", json=body).json()["radixrt"]


def test_a_stream_ends_when_the_server_does(folder):
    with serving(folder) as frontend, httpx.stream("GET", f"{frontend.url}/v1/live", timeout=10) as stream:
        lines = stream.iter_lines()
        assert next(lines) == "event: history"
        frontend.stop()
        for _ in lines:
            pass


@pytest.mark.parametrize("who", ["alpha", "beta"])
def test_top_prints_what_a_key_may_see(keyed, who, capsys):
    complete(keyed, "alpha", "something to be shown")
    assert cli.main(["top", "--once", "--url", keyed, "--api-key", KEYS[who]]) == 0
    assert ("program-of-alpha" in (out := capsys.readouterr().out)) == (who == "alpha") and f"tenant {who}" in out
