"""Hints to the cache over HTTP: a front end, a router and a fake worker with host memory, in threads."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from radixrt import assistant, gen, program
from radixrt import user as user_says
from radixrt.client import Client, ServerError
from radixrt.client.local import LocalStack
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.frontend.server import FrontendThread
from radixrt.messages import CacheAction, Namespace, Sampling, StatePrompt, TextSegment, TokenPrompt
from radixrt.worker import setup
from radixrt.worker.execution.fake_runner import FakeRunner
from tests.waiting import eventually

KEYS = ("a:key-a", "b:key-b")
VERBS = ("pin", "retain", "demote", "prefetch", "share")
SYSTEM = {"role": "system", "content": "You answer in short words. " * 8}


class Server:
    """A stack, and clients of it."""

    def __init__(self, stack: LocalStack, url: str) -> None:
        self.stack, self.url = stack, url
        self.a, self.b = (httpx.Client(base_url=url, headers={"x-api-key": f"key-{n}"}, timeout=30) for n in "ab")

    @property
    def worker(self):
        return self.stack._workers[0]

    def hint(self, verb: str, client: httpx.Client | None = None, **body) -> dict:
        response = (client or self.a).post(f"/v1/cache/{verb}", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def chat(self, messages: list[dict], client: httpx.Client | None = None, **more) -> dict:
        body = {"messages": messages, "max_tokens": 8, "temperature": 0} | more
        response = (client or self.a).post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def hit(self, messages: list[dict], client: httpx.Client | None = None, **more) -> int:
        return self.chat(messages, client, **more)["usage"]["prompt_tokens_details"]["cached_tokens"]

    def flood(self, number: int, count: int = 6) -> None:
        """Prompts of the other tenant that together need the device's pages several times over."""
        for n in range(count):
            ids = [4 + (number * 31 + n) % 400] * 900
            response = self.b.post("/v1/completions", json={"prompt": ids, "max_tokens": 1})
            assert response.status_code == 200, response.text

    def onloaded(self) -> int:
        return self.worker.cache.tier.onloaded_pages


@contextmanager
def serving(folder: Path, host: int, workers: int = 1) -> Iterator[Server]:
    """A server of workers with 2048 pages on the device, and `host` in host memory."""

    def runner(config: WorkerConfig) -> FakeRunner:
        return FakeRunner(2049, 1, 512, 1024, check=True, num_host_pages=host and host + 1)

    names = {"model": str(folder), "served_model_name": "m", "api_key": KEYS}
    router = resolve(RouterConfig(**names))
    worker = WorkerConfig(model=str(folder), served_model_name="m", fake="0,0", max_model_len=1024)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "make_runner", runner)
        with LocalStack(StackConfig(router, worker, FrontendConfig(), workers)) as stack:
            frontend = FrontendThread(resolve(FrontendConfig(**names, router=stack.address, port=0)))
            try:
                server = Server(stack, frontend.url)
                with server.a, server.b:
                    yield server
            finally:
                frontend.stop()


@pytest.fixture(scope="module")
def tiered(folder) -> Iterator[Server]:
    with serving(folder, host=20_000) as server:
        yield server


@pytest.fixture(scope="module")
def plain(folder) -> Iterator[Server]:
    with serving(folder, host=0) as server:
        yield server


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def told(text: str) -> list[dict]:
    return [SYSTEM, user(text)]


# ---------------------------------------------------------------- what each verb does


@pytest.mark.parametrize("verb", ["pin", "retain"])
def test_what_is_kept_survives_a_load_that_evicts_the_rest(plain, verb):
    kept, lost = told(f"Keep this, please, by {verb}."), [user(f"Nobody needs this, whatever {verb} does.")]
    first = plain.chat(kept)
    plain.chat(lost)
    found = plain.hint(verb, messages=kept, ttl="5m", priority=80)
    tokens = first["usage"]["prompt_tokens"]
    assert found == {"result": "done", "tokens": tokens, "bytes": 0, "worker": found["worker"]}
    plain.flood(1)
    assert plain.hit(kept) == tokens - 1
    assert plain.hit(lost) < 8
    assert plain.chat(kept)["choices"][0]["message"] == first["choices"][0]["message"]


def test_demoted_pages_come_back_as_hits_and_prefetched_ones_are_there_before(tiered):
    asked = told("Demote this and fetch it.")
    answer = tiered.chat(asked)
    usage, message = answer["usage"], answer["choices"][0]["message"]
    turn = [*asked, message]
    found = tiered.hint("demote", messages=turn)
    assert found["result"] == "done" and found["tokens"] >= usage["prompt_tokens"]
    before = tiered.onloaded()
    again = tiered.chat(asked)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    assert again["choices"][0]["message"] == message
    assert tiered.onloaded() > before, "they came from host memory"
    assert tiered.hint("demote", messages=turn)["result"] == "done"
    assert tiered.hint("prefetch", messages=turn)["result"] == "done"
    before, steps = tiered.onloaded(), tiered.worker.scheduler.steps
    eventually(lambda: tiered.worker.scheduler.steps >= steps)
    assert tiered.hit(turn) >= usage["prompt_tokens"]
    assert tiered.onloaded() == before, "nothing was copied for the request"


def test_sharing_is_refused_with_the_reason(folder):
    with serving(folder, host=0, workers=2) as server:
        asked = told("Share this.")
        server.chat(asked)
        holder, other = (
            sorted(server.stack._workers, key=lambda worker: -worker.cache.prefixes.tree.tokens)[n].identity.name
            for n in range(2)
        )
        found = server.hint("share", messages=asked, destination=other)
        assert (found["result"], found["reason"]) == ("refused", "workers share no store on disk")
        assert server.hint("share", messages=asked, destination=holder)["result"] == "done", "it is there"
        assert "no worker of that name" in server.hint("share", messages=asked, destination="w9")["reason"]
        assert "destination" in server.hint("share", messages=asked)["reason"]
        assert server.hint("prefetch", messages=asked, destination=other)["result"] == "missing"


# ---------------------------------------------------------------- addresses


def test_a_path_is_named_by_messages_text_ids_response_or_a_range(plain):
    made = plain.a.post("/v1/completions", json={"prompt": "The quick brown fox", "max_tokens": 4}).json()
    ids = plain.a.post("/tokenize", json={"prompt": "The quick brown fox"}).json()["tokens"]
    assert made["usage"]["prompt_tokens"] == len(ids)
    assert plain.hint("retain", prompt="The quick brown fox")["tokens"] == len(ids)
    assert plain.hint("retain", token_ids=ids)["tokens"] == len(ids)
    half = plain.hint("retain", token_ids=ids, token_start=2, token_end=len(ids) - 1)
    assert (half["result"], half["tokens"]) == ("done", len(ids) - 3)
    body = {"input": "Remember me.", "instructions": "Be brief.", "max_output_tokens": 8, "temperature": 0}
    response = plain.a.post("/v1/responses", json=body).json()
    found = plain.hint("pin", response_id=response["id"])
    usage = response["usage"]
    assert found["result"] == "done"
    assert 0 <= usage["input_tokens"] + usage["output_tokens"] - found["tokens"] <= 1
    assert plain.hint("pin", response_id="resp_none")["result"] == "missing"
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    asked = [user("Look there.")]
    with_tools = plain.chat(asked, tools=tools)["usage"]["prompt_tokens"]
    assert plain.hint("pin", messages=asked, tools=tools)["tokens"] == with_tools
    assert plain.hint("pin", messages=asked, tools=tools, cache_salt="s")["result"] == "missing"


def test_states_of_programs_are_named_by_session(plain):
    with Client(plain.url, api_key="key-a") as client:
        scope = "s" * 20
        prompt = StatePrompt(scope, 0, [TextSegment("Once upon a time there was")], 1)
        done = client.generate(prompt, Sampling(max_tokens=8, temperature=0))
        tokens = done.usage.prompt_tokens + done.usage.completion_tokens
        for target in ({"session": scope, "state": 1}, {"session": scope}):
            found = plain.hint("retain", **target)
            assert (found["result"], found["tokens"]) == ("done", tokens - 1)
        assert plain.hint("retain", plain.b, session=scope)["result"] == "missing"
        response = plain.b.post("/v1/cache/retain", json={"session": scope, "state": 1})
        assert response.status_code == 410


# ---------------------------------------------------------------- the field of a request


@pytest.mark.parametrize("path", ["chat/completions", "completions", "messages", "responses"])
def test_a_request_says_what_is_to_become_of_it(plain, path):
    words = f"As the request of {path} says. " * 4
    body = {
        "chat/completions": {"messages": [user(words)], "max_tokens": 4},
        "completions": {"prompt": words, "max_tokens": 4},
        "messages": {"model": "m", "messages": [user(words)], "max_tokens": 4},
        "responses": {"input": words, "max_output_tokens": 4},
    }[path]
    hints = {
        "protocol_version": "0.1",
        "message_id": "1",
        "actions": [
            {"action_id": "1", "action_type": "kv.retain", "action_version": "1.0", "payload": {"priority": 99}},
            {"action_id": "2", "action_type": "kv.fetch", "action_version": "1.0", "payload": {"what": "is this"}},
        ],
    }
    priorities = plain.worker.cache.prefixes.priorities
    before = {key for key, pin in priorities._pins.items() if pin.priority == 99}
    assert plain.a.post(f"/v1/{path}", json=body | {"kv_hints": hints}).status_code == 200
    eventually(lambda: any(key not in before and pin.priority == 99 for key, pin in [*priorities._pins.items()]))
    wrong = {"actions": [{"action_type": "prefetch"}]}
    refused = plain.a.post(f"/v1/{path}", json=body | {"kv_hints": wrong})
    assert refused.status_code == 400 and "kv_hints.actions" in refused.text


# ---------------------------------------------------------------- other clients


@pytest.mark.parametrize("over", ["http", "zmq"])
def test_the_native_clients_give_the_same_hints(tiered, over):
    url = tiered.url if over == "http" else tiered.stack.address
    greedy = Sampling(max_tokens=8, temperature=0)
    with Client(url, api_key="key-a") as client:
        asked = told(f"A native client, over {over}.")
        done = client.generate(asked, greedy, cache=[CacheAction("retain", priority=3)])
        tokens = done.usage.prompt_tokens
        turn = [*asked, done.to_openai()]
        assert client.pin(asked, seconds=60.0).tokens == tokens
        assert client.retain(turn, priority=90, seconds=60.0).result == "done"
        half = client.retain(client.tokenize(asked), token_start=3, token_end=10)
        assert (half.result, half.tokens) == ("done", 7)
        worker = tiered.worker.identity.name
        assert client.share(asked, worker=worker).result == "done"
        assert client.demote(asked, cache_salt="other").result == "missing"
        assert client.demote(turn).tokens == 0, "the pin holds it"
        assert client.pin(asked, seconds=0.01).result == "done"
        time.sleep(0.05)
        eventually(lambda: client.demote(turn).tokens > 0)
        assert client.prefetch(turn, worker=worker).result == "done"
        assert client.generate(asked, greedy).text == done.text
        with pytest.raises(ServerError, match="seconds"):
            client.pin(asked, seconds=0)
        with pytest.raises(ServerError, match="cache"):
            client.generate(asked, greedy, cache=[CacheAction("prefetch")])
        assert client.delete_cache().result == "done"
        assert client.pin(asked).result == "missing"


@pytest.mark.parametrize("plain_function", [False, True])
def test_a_program_gives_hints_for_its_branches(tiered, plain_function):
    name = f"plain {plain_function}"

    async def alone(s):
        early = await s.hint("retain")
        s += user_says(f"Say something, {name}.")
        s += assistant(gen("said", max_tokens=8, temperature=0))
        found = [await s.hint("retain", priority=70), await s.hint("demote"), await s.hint("prefetch")]
        s += user_says("And again.")
        s += assistant(gen("again", max_tokens=8, temperature=0))
        return early, found, (await s.value("again")).usage

    def plainly(s):
        early = s.hint("retain")
        s += user_says(f"Say something, {name}.")
        s += assistant(gen("said", max_tokens=8, temperature=0))
        found = [s.hint("retain", priority=70), s.hint("demote"), s.hint("prefetch")]
        s += user_says("And again.")
        s += assistant(gen("again", max_tokens=8, temperature=0))
        return early, found, s.value("again").usage

    with Client(tiered.url, api_key="key-a") as client:
        early, found, usage = program(plainly if plain_function else alone).run(client)
    assert early.result == "missing"
    assert [one.result for one in found] == ["done", "clipped", "done"], "all but what other chats begin with as well"
    assert found[0].tokens == found[2].tokens > found[1].tokens > 20 and usage.cached_tokens >= found[0].tokens


# ---------------------------------------------------------------- bounds and errors


def test_a_flood_of_hints_is_refused_before_it_costs_anything(plain, monkeypatch):
    """Counted: what reaches the worker, what is encoded, and what another tenant's request computes meanwhile."""
    router, acted, encoded = plain.stack._router_thread.server, [], []
    act, encode = plain.worker.cache.hints.act, router.text.encode

    def counted(namespace, ids, action, now):
        acted.append(len(ids))
        return act(namespace, ids, action, now)

    async def counted_encode(prompt, *args):
        encoded.append(prompt)
        return await encode(prompt, *args)

    monkeypatch.setattr(plain.worker.cache.hints, "act", counted)
    monkeypatch.setattr(router.text, "encode", counted_encode)
    asked = told("Mine, as before.")
    first = plain.chat(asked, plain.b)
    steps = plain.worker.scheduler.steps
    with Client(plain.stack.address, api_key="key-a") as client:
        prompt = TokenPrompt(array("i", range(5, 505)).tobytes() * 100)  # 50,000 tokens
        found = [client.retain(prompt) for _ in range(60)]
        refused = [one for one in found if one.result == "refused"]
        assert len(refused) >= 15 and all(one.retry_after > 0 for one in refused)
        assert client.pin("The quick brown fox. " * 50).result == "refused"
    assert not encoded, "nor is text encoded of who has no budget left"
    assert sum(acted) // 4 <= 45 * 50_000
    assert plain.worker.scheduler.steps == steps, "hints take no step"
    again = plain.chat(asked, plain.b)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"] - 1
    assert again["choices"][0]["message"] == first["choices"][0]["message"]
    assert plain.hint("pin", plain.b, messages=asked)["result"] == "done", "another tenant's are taken"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "messages"),
        ({"prompt": "x", "token_ids": [5]}, "token_ids"),
        ({"prompt": "x", "state": 1}, "state"),
        ({"prompt": "x", "priority": 101}, "priority"),
        ({"prompt": "x", "ttl": "soon"}, "ttl"),
        ({"prompt": "x", "ttl": 0}, "ttl"),
        ({"prompt": "x", "token_start": 5, "token_end": 5}, "token_end"),
        ({"prompt": "x", "token_start": -1}, "token_start"),
        ({"token_ids": [100_000]}, "token_ids"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"prompt": "x", "model": "other"}, "model"),
    ],
)
def test_what_is_invalid_is_refused_by_its_name(plain, body, field):
    response = plain.a.post("/v1/cache/pin", json=body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"].startswith(field)


def test_a_key_is_needed_and_other_verbs_are_not_served(plain):
    with httpx.Client(base_url=plain.url) as nobody:
        for verb in VERBS:
            assert nobody.post(f"/v1/cache/{verb}", json={"prompt": "x"}).status_code == 401
        assert nobody.delete("/v1/cache").status_code == 401
    assert plain.a.post("/v1/cache/empty", json={"prompt": "x"}).status_code == 404


def test_times_are_bounded(plain):
    asked = told("For how long?")
    plain.chat(asked)
    found = plain.hint("pin", messages=asked, ttl="9h")
    assert found["result"] == "clipped" and "3600 seconds" in found["reason"]
    assert plain.hint("pin", messages=asked, ttl="1h")["result"] == "done"


@pytest.mark.parametrize("verb", VERBS)
def test_another_tenant_neither_sees_nor_moves_anything(tiered, verb):
    asked = told(f"This is a's alone: {verb}.")
    tokens = tiered.chat(asked)["usage"]["prompt_tokens"]
    tree = tiered.worker.cache.prefixes
    namespace = Namespace("a", "m").key
    ids = array("i", tiered.a.post("/tokenize", json={"messages": asked}).json()["tokens"])
    assert tree.on_device(namespace, ids) == tokens
    found = tiered.hint(verb, tiered.b, messages=asked, destination=tiered.worker.identity.name)
    assert (found["result"], found["tokens"]) == ("missing", 0)
    assert tree.on_device(namespace, ids) == tokens


def test_counts_are_in_the_metrics_and_the_report(plain):
    asked = told("Count me.")
    plain.chat(asked)
    before = plain.a.get("/v1/report").json()["hints"]["pin"]["done"]
    plain.hint("pin", messages=asked)
    plain.hint("pin", plain.b, messages=told("Never seen."))
    report = plain.a.get("/v1/report").json()["hints"]
    assert report["pin"]["done"] == before + 1
    assert (
        plain.b.get("/v1/report").json()["hints"] == {"pin": {"missing": 1, "tokens": 0}}
        or "pin" in (plain.b.get("/v1/report").json()["hints"])
    )
    text = plain.a.get("/metrics").text
    assert 'radixrt_cache_hints_total{result="done",tenant="a",verb="pin"}' in text and 'tenant="b"' not in text


# ---------------------------------------------------------------- delete


def test_one_call_deletes_what_a_tenant_has_and_nothing_of_others(tiered):
    asked = told("Delete me.")
    for client in (tiered.a, tiered.b):
        tiered.chat(asked, client)
    tiered.hint("pin", messages=asked)
    stored = tiered.a.post("/v1/responses", json={"input": "Stored.", "max_output_tokens": 4}).json()["id"]
    kept = tiered.b.post("/v1/responses", json={"input": "Stored.", "max_output_tokens": 4}).json()["id"]
    response = tiered.a.delete("/v1/cache")
    found = response.json()
    assert response.status_code == 200 and found["result"] == "done" and found["tokens"] > 0
    namespaces = {event[1] for event in tiered.worker.cache.prefixes.tree.snapshot()[1:]}
    namespaces |= {event[1] for event in tiered.worker.cache.tier.tree.snapshot()[1:]}
    assert namespaces and all(name.startswith("b\n") for name in namespaces)
    assert tiered.a.get(f"/v1/responses/{stored}").status_code == 404
    assert tiered.b.get(f"/v1/responses/{kept}").status_code == 200
    assert tiered.hint("pin", messages=asked)["result"] == "missing"
    assert tiered.hit(asked, tiered.b) > 0 and tiered.hit(asked) == 0
