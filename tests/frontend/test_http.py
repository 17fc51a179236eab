"""HTTP beyond OpenAI's API: the native protocol, the server's own routes, clients that misbehave."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from radixrt.client import Client, ServerError
from radixrt.client.local import LocalStack
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.frontend.http.protocol import MAX_PIPELINED
from radixrt.frontend.server import FrontendThread, listen
from radixrt.launch.launcher import start_subprocess, stop_subprocesses
from radixrt.messages import Origin, Sampling
from radixrt.process.ports import free_tcp_address
from radixrt.router.server.process import RouterThread
from tests.frontend.conftest import serving
from tests.waiting import eventually

HELLO = [{"role": "user", "content": "hi"}]
SHORT = Sampling(max_tokens=8, temperature=0.0)


@pytest.fixture(scope="module")
def http(url) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=10) as client:
        yield client


def error_of(response: httpx.Response) -> dict:
    return response.json()["error"]


# ---------------------------------------------------------------- the native protocol


def test_the_native_client_over_http(url):
    with Client(url) as client:
        whole = client.generate("Once upon", SHORT, origin=Origin("story", "0", 1))
        deltas = list(client.stream("Once upon", SHORT))
        assert "".join(d.text for d in deltas) == whole.text and deltas[-1].usage.completion_tokens == 8
        assert len(client.generate_n("Once upon", 3, SHORT)) == 3
        scored = client.score("The dog", [" barks", " reads"])
        assert len(scored.logprobs) == 2 and scored.usage.cached_tokens > 0
        ids = client.tokenize("The dog")
        assert client.detokenize(ids) == "The dog"
        assert client.health()["serving"] and client.models()[0]["id"] == "m"
        assert any(row["program"] == "story" and row["depth"] == 1 for row in client.report()["programs"])
        assert "radixrt_requests_total" in client.metrics()
        with pytest.raises(ServerError) as caught:
            client.generate("x", Sampling(top_p=7.0))
        assert (caught.value.code, caught.value.field) == (400, "top_p")


def test_a_prompt_that_cannot_fit_is_refused_before_all_of_it_is_encoded(url, http):
    text = "the dog " * 400_000
    with Client(url) as client:
        with pytest.raises(ServerError) as caught:
            client.generate(text, SHORT)
        assert caught.value.code == 400 and caught.value.field == "prompt"
    found = [str(caught.value)]
    chat = [{"role": "user", "content": text}]
    for path, body in (("completions", {"prompt": text}), ("chat/completions", {"messages": chat})):
        response = http.post(f"/v1/{path}", json={"model": "m", **body})
        assert response.status_code == 400
        found.append(error_of(response)["message"])
    for message in found:
        assert "prompt is too long: " in message and "> 8191 maximum" in message and "counted to its end" in message
    kept = http.post(
        "/v1/completions", json={"model": "m", "prompt": text, "truncate_prompt_tokens": 20, "max_tokens": 1}
    )
    assert kept.status_code == 200 and kept.json()["usage"]["prompt_tokens"] == 20


def test_the_native_client_uses_its_connection_again(url):
    def connections() -> int:
        here = psutil.Process().net_connections("tcp")
        return sum(link.status == psutil.CONN_ESTABLISHED and link.laddr.port == port for link in here)

    port = httpx.URL(url).port
    with Client(url) as client:
        before = connections()
        for _ in range(10):
            client.generate("Once upon", SHORT)
            assert list(client.stream("Once upon", SHORT))
            client.score("The dog", [" barks", " reads"])
            client.health()
        assert connections() <= before + 2


@pytest.mark.parametrize("body", [b"", b"{", b'{"type":"dance"}', b'{"type":"generate","id":"x"}', b"[1]", b"\xff\xfe"])
def test_native_garbage_is_400(http, body):
    response = http.post("/v1/native", content=body)
    assert response.status_code == 400 and response.headers["content-type"] == "application/x-ndjson"
    (line,) = response.text.splitlines()
    assert json.loads(line)["type"] == "error" and json.loads(line)["message"]


def test_a_native_refusal_is_a_line_and_the_status(http):
    request = {"type": "generate", "id": 7, "prompt": {"type": "text", "text": "x"}}
    response = http.post("/v1/native", json=request | {"sampling": {"top_p": 7}})
    error = response.json()
    assert response.status_code == 400 and (error["type"], error["id"], error["field"]) == ("error", 7, "top_p")
    for changes in ({"n": 1 << 70}, {"sampling": {"seed": 1 << 70}}, {"id": 1 << 70}):
        response = http.post("/v1/native", json=request | {"sampling": {"max_tokens": 1}} | changes)
        assert response.status_code == (200 if "id" in changes else 400), changes


def test_the_native_client_sees_the_errors_of_the_front_end(folder):
    with serving(folder, api_key=("t:key",), max_body_bytes=3000) as frontend:
        with Client(frontend.url, api_key="key") as client:
            assert client.generate("x", SHORT).usage.completion_tokens == 8
            with pytest.raises(ServerError) as caught:
                client.generate("x" * 5000, SHORT)
            assert caught.value.code == 413
        for key in ("", "wrong"):
            with pytest.raises(ServerError) as caught:
                Client(frontend.url, api_key=key)
            assert caught.value.code == 401
        with httpx.Client(base_url=frontend.url) as http:
            ask = {"type": "ask", "id": 1, "what": "models"}
            assert http.post("/v1/native", json=ask).status_code == 401
            assert http.post("/v1/native", json=ask | {"api_key": "key"}).status_code == 200
            wrong = http.post("/v1/native", json=ask | {"api_key": "key"}, headers={"x-api-key": "wrong"})
            assert wrong.status_code == 401
            for path in ("/metrics", "/v1/report", "/v1/models"):
                assert http.get(path).status_code == 401
                assert http.get(path, headers={"x-api-key": "key"}).status_code == 200
                empty = {"authorization": "Bearer", "x-api-key": "key"}
                assert http.get(path, headers=empty).status_code == 200
            assert http.get("/health").status_code == 200


def test_a_key_beyond_ascii(folder):
    """In a header as UTF-8, as our client and most write it, or as Latin-1."""
    with serving(folder, api_key=("t:schlüssel",)) as frontend:
        with Client(frontend.url, api_key="schlüssel") as client:
            client.generate("x", SHORT, origin=Origin("größe"))
        with httpx.Client(base_url=frontend.url) as http:
            for coding in ("utf-8", "latin-1"):
                assert http.get("/v1/models", headers={"x-api-key": "schlüssel".encode(coding)}).status_code == 200
            headers = {"authorization": "Bearer schlüssel".encode(), "x-radixrt-program": "größe".encode()}
            assert http.post("/v1/completions", json={"prompt": "x"}, headers=headers).status_code == 200
            programs = http.get("/v1/report", headers=headers).json()["programs"]
        assert [(row["program"], row["requests"]) for row in programs] == [("größe", 2)]


def test_a_native_message_without_a_key_is_not_read(folder):
    """Beyond some KiB, in which it may have its key itself; where no keys are configured all of it is."""
    ask = {"type": "tokenize", "id": 1, "prompt": {"type": "text", "text": "x"}}
    small = json.dumps(ask | {"api_key": "key"}).encode()
    large = json.dumps(ask | {"api_key": "key", "prompt": {"type": "text", "text": "x" * 9_000}}).encode()
    with serving(folder, api_key=("key",)) as frontend, httpx.Client(base_url=frontend.url) as http:
        for size, body, status in ((1 << 40, b"", 401), (len(large), b"", 401), (len(small), small, 200)):
            with socket.create_connection(("127.0.0.1", int(frontend.url.rpartition(":")[2])), 10) as sock:
                sock.sendall(b"POST /v1/native HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % size + body)
                assert sock.recv(65536).startswith(b"HTTP/1.1 %d " % status)
        for body in (large, (large[i : i + 1000] for i in range(0, len(large), 1000))):
            refused = http.post("/v1/native", content=body)
            assert refused.status_code == 401 and "needs it in a header" in refused.json()["message"]
        for headers in ({"x-api-key": "key"}, {"authorization": "Bearer key"}):
            assert http.post("/v1/native", content=large, headers=headers).status_code == 200
    with serving(folder) as frontend:
        assert httpx.post(frontend.url + "/v1/native", content=large).status_code == 200


def test_native_cancel_is_refused(http):
    assert http.post("/v1/native", json={"type": "cancel", "id": 1}).status_code == 400


# ---------------------------------------------------------------- own routes


def test_tokenize_and_detokenize(http):
    found = http.post("/tokenize", json={"prompt": "hello dog"}).json()
    assert found["count"] == len(found["tokens"]) > 0
    assert found["max_model_len"] == 8192 and found["token_strs"] is None
    shown = http.post("/tokenize", json={"prompt": "hello dog", "return_token_strs": True}).json()
    assert "".join(shown["token_strs"]) == "hello dog"
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "hello dog"}
    assert http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()["count"] > 3
    for body in ({}, {"prompt": 3}, {"prompt": "a", "messages": []}):
        assert http.post("/tokenize", json=body).status_code == 400
    body = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"tools": []}}
    assert http.post("/tokenize", json=body).json()["error"]["param"] == "chat_template_kwargs"
    for tokens in ([-1], [99999], [1 << 40], ["a"]):
        assert http.post("/detokenize", json={"tokens": tokens}).status_code == 400


def test_a_text_of_very_many_tokens_is_not_listed(http, monkeypatch):
    monkeypatch.setattr("radixrt.frontend.openai.tokenization.MAX_LISTED_TOKENS", 1000)
    for prompt in ("The dog barks. " * 300, "The dog barks. " * 30_000):
        refused = http.post("/tokenize", json={"prompt": prompt})
        assert refused.status_code == 400 and "more than 1000 tokens" in error_of(refused)["message"]
    assert http.post("/tokenize", json={"prompt": "The dog barks. " * 30}).status_code == 200


@pytest.mark.parametrize("field", ["model", "cache_salt"])
def test_names_are_short(http, field):
    """They become part of namespaces, which are kept."""
    named = {"model": "m", field: "x" * 2000}
    ask = {"max_tokens": 1, "max_output_tokens": 16, "messages": HELLO, "prompt": "a", "input": "a"} | named
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"):
        refused = http.post(path, json=ask)
        assert refused.status_code == 400 and "Expected `str` of length <= 1024" in error_of(refused)["message"]
    native = {"type": "generate", "id": 1, "prompt": {"type": "text", "text": "a"}}
    refused = http.post("/v1/native", json=native | named)
    assert refused.status_code == 400 and refused.json()["field"] == field


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/messages/count_tokens", {"messages": HELLO}),
        ("/v1/responses/input_tokens", {"input": "a"}),
    ],
)
def test_routes_that_only_count_know_which_models_are_served(http, path, body):
    served = http.get("/v1/models").json()["data"][0]["id"]
    assert http.post(path, json=body | {"model": served}).status_code == 200
    answer = http.post(path, json=body | {"model": "other"})
    error = answer.json()["error"]
    assert answer.status_code == 404 and "'other' is not served here" in error["message"]
    assert error["type"] == "not_found_error"


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/flush_cache", "client"])
def test_caches_are_cleared_on_request(http, url, path):
    prompt = {"prompt": list(range(3, 60)), "max_tokens": 1}

    def cached() -> int:
        usage = http.post("/v1/completions", json=prompt).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [cached() for _ in range(2)][1] == 56
    if path == "client":
        with Client(url) as client:
            client.clear_cache()
    else:
        assert http.post(path).json() == {"success": True}
    assert [cached() for _ in range(2)] == [0, 56]


def test_the_admin_clears_the_caches_of_all_tenants_and_none_of_these_does(folder):
    keys = {"api_key": ("a:key", "b:other"), "admin_api_key": "root"}
    with serving(folder, workers=1, **keys) as frontend, httpx.Client(base_url=frontend.url) as http:
        assert http.post("/flush_cache").status_code == 401
        refused = http.post("/flush_cache", headers={"x-api-key": "key"})
        assert refused.status_code == 403 and "all tenants" in error_of(refused)["message"]
        cached = []
        with Client(frontend.url, api_key="key") as client, Client(frontend.url, api_key="root") as admin:
            for clear in (
                lambda: None,
                lambda: http.post("/flush_cache", headers={"authorization": "Bearer root"}).raise_for_status(),
                admin.clear_cache,
            ):
                clear()
                cached += [client.generate(list(range(3, 60)), SHORT).usage.cached_tokens for _ in range(2)]
            assert [row["tenant"] for row in admin.report()["tenants"]] == ["a"]
            with pytest.raises(ServerError, match="unknown API key"):
                admin.generate([3, 4, 5], SHORT)
        assert cached == [0, 56] * 3


def test_a_browser_asks_its_user_for_a_key(folder):
    page = {"accept": "text/html,*/*;q=0.8"}
    with serving(folder, workers=1, api_key=("a:ka",), admin_api_key="root") as frontend:
        with httpx.Client(base_url=frontend.url) as http:
            asked = http.get("/v1/report", headers=page)
            assert asked.status_code == 401 and asked.headers["www-authenticate"].startswith("Basic ")
            assert http.get("/v1/report", headers=page, auth=("", "wrong")).status_code == 401
            for key in ("root", "ka"):
                shown = http.get("/v1/report", headers=page, auth=("anyone", key))
                assert shown.status_code == 200 and (" of a</h1>" in shown.text) == (key == "ka")
            assert "www-authenticate" not in http.get("/v1/report").headers, "programs are told in JSON"
            assert http.post("/flush_cache", auth=("", "root")).status_code == 401, "other pages can make browsers ask"


def test_health_metrics_and_report(http):
    http.post("/v1/completions", json={"model": "m", "prompt": "hi"}, headers={"x-radixrt-program": "p"})
    assert http.get("/health").json() == {"status": "ok", "workers": 2, "stalled_seconds": 0.0}
    metrics = http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    names = {family.name for family in text_string_to_metric_families(metrics.text)}
    assert {"radixrt_requests", "radixrt_cached_prompt_tokens", "radixrt_worker_pages"} <= names
    report = http.get("/v1/report").json()
    assert report["total"]["requests"] > 0 and any(row["program"] == "p" for row in report["programs"])
    page = http.get("/v1/report", headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert page.headers["content-type"].startswith("text/html") and "Cache-hit-rate report" in page.text
    assert "script" not in page.headers["content-security-policy"]


def test_who_sees_which_figures(folder):
    with serving(folder, workers=1, api_key=("a:ka", "b:kb"), admin_api_key="root") as frontend:

        def get(path: str, key: str) -> httpx.Response:
            return httpx.get(frontend.url + path, headers={"x-api-key": key})

        for key in ("ka", "kb"):
            with Client(frontend.url, api_key=key) as client:
                client.generate("a b", SHORT)
        shown = {key: get("/metrics", key).text for key in ("ka", "kb", "root")}
        assert {key: [name for name in "ab" if f'tenant="{name}"' in text] for key, text in shown.items()} == {
            "ka": ["a"], "kb": ["b"], "root": ["a", "b"],
        }  # fmt: skip
        assert [name in shown[key] for key in ("ka", "root") for name in ("radixrt_requests", "radixrt_worker")] == [
            False, False, True, True,
        ]  # fmt: skip
        tenants = {key: [row["tenant"] for row in get("/v1/report", key).json()["tenants"]] for key in shown}
        assert tenants == {"ka": ["a"], "kb": ["b"], "root": ["a", "b"]}
        assert [get(path, key).status_code for path in ("/metrics", "/v1/report") for key in ("", "x")] == [401] * 4
        assert get("/v1/models", "root").status_code == 401, "it is no tenant's"
        assert httpx.get(frontend.url + "/health").json() == {"status": "ok", "workers": 1, "stalled_seconds": 0.0}
        assert httpx.head(frontend.url).status_code == 200


def test_a_client_may_ask_whether_there_is_a_server(http):
    """As Claude Code does."""
    answer = http.head("/")
    assert (answer.status_code, answer.content) == (200, b"")


def test_routes_that_are_none(http):
    assert (
        http.get("/v2/nothing").status_code == 404 and "no such route" in error_of(http.get("/v2/nothing"))["message"]
    )
    assert http.get("/v1/completions").status_code == 405
    for method, path, said in (
        ("POST", "/chat/completions", "for /v1/chat/completions the client's base URL must end with /v1"),
        ("GET", "/models", "for /v1/models the client's base URL must end with /v1"),
        ("POST", "/v1/v1/messages", "for /v1/messages the client's base URL must not end with /v1"),
    ):
        answer = http.request(method, path)
        assert answer.status_code == 404 and error_of(answer)["message"] == f"no such route: {path}; {said}"
    for path in ("/v1/health", "/v1/v1/nothing", "/nothing", "/v1"):
        assert error_of(http.post(path))["message"] == f"no such route: {path}"
    assert http.delete("/health").status_code == 405


@pytest.mark.parametrize("body", [b"", b"{bad", b"[]", b'"text"', b"\xff", b'{"prompt": "\xff"}', b"null"])
def test_a_body_that_is_no_request(http, body):
    for route in ("/v1/completions", "/v1/chat/completions"):
        response = http.post(route, content=body)
        assert response.status_code == 400 and error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("tail", "said"),
    [
        (b"}", "not JSON"),
        (b'"model": "\xff"}', "not UTF-8"),
        (b'"x": ' + b"[" * 20_000, "nested too deeply"),
        (b'"stream": 3}', "stream"),
    ],
)
def test_a_body_with_a_fault_behind_a_number_of_another_type(http, tail, said):
    """Which is read a second time, and then further: the error is about that fault."""
    for route in ("/v1/completions", "/v1/chat/completions", "/v1/messages"):
        response = http.post(route, content=b'{"max_tokens": 3.0, "messages": [], ' + tail)
        assert response.status_code == 400 and error_of(response)["type"] == "invalid_request_error"
        assert said in error_of(response)["message"] and "max_tokens" not in error_of(response)["message"]


def test_a_number_that_is_too_large_somewhere_in_a_message(http):
    """The field is named as far as it is known."""
    body = b'{"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": [{"x": 1e999}]}]}'
    assert error_of(http.post("/v1/chat/completions", content=body))["param"] == "messages[1]"


@pytest.mark.parametrize("field", ["prompt", "unknown", "messages"])
def test_a_body_that_is_nested_too_deeply(http, field):
    nested = b"[" * 100_000 + b"]" * 100_000
    content = b'{"prompt":"a","messages":[{"role":"user","content":"a"}],"%b":%b}' % (field.encode(), nested)
    for route in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/native"):
        assert http.post(route, content=content).status_code == 400


@pytest.mark.parametrize("depth", [b"-1", b"x", b"\xb2", b"1" * 10])
def test_a_header_that_is_no_number(http, depth):
    response = http.post("/v1/completions", json={"prompt": "a"}, headers=[(b"x-radixrt-depth", depth)])
    assert response.status_code == 400 and error_of(response)["param"] == "x-radixrt-depth"


def test_a_context_of_its_own(folder):
    with serving(folder, max_model_len=40) as frontend, httpx.Client(base_url=frontend.url) as client:
        body = {"prompt": [5] * 30, "ignore_eos": True}
        for path, more in (("completions", {"max_tokens": 100}), ("chat/completions", {"messages": HELLO})):
            usage = client.post(f"/v1/{path}", json=body | more).json()["usage"]
            assert usage["total_tokens"] == 40 and usage["completion_tokens"] > 0
        response = client.post("/v1/completions", json=body | {"prompt": [5] * 40})
        assert response.status_code == 400 and error_of(response)["param"] == "prompt"


def test_a_worker_is_drained_by_who_may(url):
    """Not by web pages that somebody visits; it must be there, and not the only one."""
    page = {"origin": "https://evil.example", "content-type": "text/plain"}
    body = {"worker": "worker-9"}
    with httpx.Client(base_url=url) as client:
        assert client.post("/v1/drain_worker", json=body, headers=page).status_code == 403
        native = {"type": "drain_worker", "id": 1, "worker": "worker-9"}
        assert client.post("/v1/native", json=native, headers=page).status_code == 403
        unknown = client.post("/v1/drain_worker", json=body)
        assert unknown.status_code == 404 and "worker-0, worker-1" in error_of(unknown)["message"]
        assert client.post("/v1/drain_worker", json={}).status_code == 400


def test_with_keys_only_the_admin_drains(folder):
    with serving(folder, workers=1, api_key=("t:key",)) as frontend, httpx.Client(base_url=frontend.url) as client:
        for key, code in (("key", 403), ("other", 401)):
            answer = client.post(
                "/v1/drain_worker", json={"worker": "worker-0"}, headers={"authorization": f"Bearer {key}"}
            )
            assert answer.status_code == code and error_of(answer)["param"] == "api_key"


def test_a_body_that_is_too_large(folder):
    with serving(folder, max_body_bytes=10_000) as frontend, httpx.Client(base_url=frontend.url) as client:
        body = json.dumps({"prompt": "x" * 20_000}).encode()
        assert client.post("/v1/completions", content=body).status_code == 413
        chunks = client.post("/v1/completions", content=(body[i : i + 1000] for i in range(0, len(body), 1000)))
        assert chunks.status_code == 413 and "10000 bytes" in error_of(chunks)["message"]
        assert client.get("/health").status_code == 200


def test_without_a_tokenizer_ids_are_served():
    with serving(None) as frontend, httpx.Client(base_url=frontend.url) as client:
        fine = client.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 3})
        assert fine.status_code == 200 and fine.json()["usage"]["completion_tokens"] == 3
        for body in ({"prompt": "text"}, {"prompt": [5], "stop": "x"}):
            response = client.post("/v1/completions", json=body)
            assert response.status_code == 400 and "tokenizer" in error_of(response)["message"]


# ---------------------------------------------------------------- nobody there


def test_no_worker_and_no_router(folder):
    names = {"model": str(folder), "served_model_name": "m"}
    addresses = {"client_address": "inproc://front-lonely", "worker_address": "inproc://front-lonely-w"}
    router = RouterThread(resolve(RouterConfig(**names, **addresses)))
    frontend = FrontendThread(resolve(FrontendConfig(**names, router="inproc://front-lonely", port=0)))
    try:
        with httpx.Client(base_url=frontend.url) as client:
            for response in (
                client.get("/health"),
                client.post("/v1/completions", json={"prompt": "x", "stream": True}),
            ):
                assert response.status_code == 503 and response.headers["retry-after"]
                assert "no worker" in response.text
    finally:
        frontend.stop()
        router.stop()


def test_a_router_that_is_gone(folder):
    names = {"model": str(folder), "served_model_name": "m"}
    address = free_tcp_address()
    router = resolve(RouterConfig(**names))
    worker = WorkerConfig(model=str(folder), served_model_name="m", fake="0,0.01", max_model_len=8192)
    body = {"prompt": "x", "max_tokens": 5000, "ignore_eos": True, "stream": True}
    stack = LocalStack(StackConfig(router, worker, FrontendConfig()), client_address=address).__enter__()
    frontend = FrontendThread(resolve(FrontendConfig(**names, router=address, port=0)))
    try:
        with httpx.Client(base_url=frontend.url, timeout=5) as client:
            with client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                stack.__exit__()
                last = [line for line in lines if line][-1]
            assert "lost" in json.loads(last.removeprefix("data: "))["error"]["message"]
            for response in (client.get("/health"), client.post("/v1/completions", json=body), client.get("/metrics")):
                assert response.status_code == 503 and response.headers["retry-after"]
                assert "router" in response.text
            with LocalStack(StackConfig(router, worker, FrontendConfig()), client_address=address):
                eventually(lambda: client.get("/health").status_code == 200)  # it comes back with the router
    finally:
        frontend.stop()


def test_a_process_that_is_told_to_stop(folder, capfd):
    """It finishes its streams, and takes no new connections. Told twice it ends them with an error; the exit code is
    0, and nothing is said of it."""
    names = {"model": str(folder), "served_model_name": "m"}
    address = free_tcp_address()
    port = int(free_tcp_address().rpartition(":")[2])
    worker = WorkerConfig(model=str(folder), served_model_name="m", fake="0,0.01", max_model_len=8192)
    body = {"prompt": "x", "max_tokens": 5000, "ignore_eos": True, "stream": True}
    stack = LocalStack(StackConfig(resolve(RouterConfig(**names)), worker, FrontendConfig()), client_address=address)
    with stack, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
        child = start_subprocess("frontend", "frontend", FrontendConfig(**names, router=address, port=port))
        try:
            eventually(lambda: can_connect(port) or not child.alive)
            assert child.alive
            with client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                began = time.monotonic()
                child.process.terminate()
                eventually(lambda: not can_connect(port))
                for _ in range(10):
                    next(lines)
                child.process.terminate()
                last = [line for line in lines if line][-1]
            assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
            assert child.process.wait(30) == 0 and time.monotonic() - began < 30, "far from 5000 steps"
        finally:
            stop_subprocesses([child])
    assert "Traceback" not in capfd.readouterr().err


def can_connect(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def test_beyond_loopback_keys_are_needed():
    with pytest.raises(ValueError, match="--api-key"):
        listen(FrontendConfig(host="0.0.0.0", port=0))
    listen(FrontendConfig(host="0.0.0.0", port=0, api_key=("t:key",))).close()


def test_processes_of_a_stack_share_a_port():
    with listen(FrontendConfig(port=0, shares_port=True)) as first:
        port = first.getsockname()[1]
        with listen(FrontendConfig(port=port, shares_port=True)) as second:
            assert second.getsockname()[1] == port
        with pytest.raises(OSError, match="Address already in use"):
            listen(FrontendConfig(port=port))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="cannot listen on 127.0.0.1"):
            listen(FrontendConfig(port=taken.getsockname()[1]))


# ---------------------------------------------------------------- clients that leave


def wait_until_idle(url: str) -> dict:
    with Client(url) as client:

        def idle() -> dict | None:
            health = client.health()
            worker = health["workers"][0]
            used = worker["total_pages"] - worker["free_pages"] - worker["evictable_pages"]
            return None if health["runs_in_flight"] or worker["running"] or used else health

        # Less than the thousands of steps take that these tests do not let finish.
        return eventually(idle, 15)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/native"])
def test_a_client_that_leaves_cancels(slow_url, stream, route):
    before = wait_until_idle(slow_url)["counters"]["cancelled"]
    body = {"prompt": "endless", "max_tokens": 5000, "ignore_eos": True, "stream": stream}
    if route == "/v1/native":
        sampling = {"max_tokens": 5000, "ignore_eos": True}
        body = {
            "type": "generate",
            "id": 1,
            "prompt": {"type": "text", "text": "x"},
            "sampling": sampling,
            "stream": stream,
        }
    with httpx.Client(base_url=slow_url) as client:
        if stream:
            with client.stream("POST", route, json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(route, json=body, timeout=0.2)
    assert wait_until_idle(slow_url)["counters"]["cancelled"] == before + 1


def test_a_stop_string_ends_the_work(slow_url):
    wait_until_idle(slow_url)
    with httpx.Client(base_url=slow_url) as client:
        body = {"prompt": "abc", "max_tokens": 4000, "ignore_eos": True, "temperature": 0}
        head = client.post("/v1/completions", json=body | {"max_tokens": 20}).json()["choices"][0]["text"]
        began = time.monotonic()
        cut = client.post("/v1/completions", json=body | {"stop": [head[8:11]], "n": 2}).json()
        assert time.monotonic() - began < 15, "far from 4000 steps"
    assert [c["finish_reason"] for c in cut["choices"]] == ["stop", "stop"]
    assert cut["usage"]["completion_tokens"] < 60
    assert wait_until_idle(slow_url)


def test_a_client_that_does_not_read_is_cut_off(slow_url, monkeypatch):
    monkeypatch.setattr("radixrt.frontend.http.outbox.MAX_BACKLOG", 20_000)
    wait_until_idle(slow_url)
    host, port = slow_url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True, "n": 64}).encode()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((host, int(port)))
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
        sock.sendall(head % len(body) + body)
        assert wait_until_idle(slow_url)


def test_only_so_many_requests_of_a_connection_wait(url):
    """A read of the connection may bring thousands of them."""
    one = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for count, all_of_them in ((MAX_PIPELINED, True), (20 * MAX_PIPELINED, False)):
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port), timeout=10) as client:
            answers = b""
            try:
                client.sendall(one * count)
                while answers.count(b" 200 OK") < count and (more := client.recv(1 << 16)):
                    answers += more
            except ConnectionError:
                pass
        assert (answers.count(b" 200 OK") == count) == all_of_them


def test_many_streams_at_once(slow_url):
    with httpx.Client(base_url=slow_url) as client:
        expected = client.post("/v1/completions", json={"prompt": "p", "max_tokens": 40, "temperature": 0}).json()
    texts: list[str] = []

    def follow() -> None:
        body = {"prompt": "p", "max_tokens": 40, "temperature": 0, "stream": True}
        with httpx.Client(base_url=slow_url) as client, client.stream("POST", "/v1/completions", json=body) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        texts.append("".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]))

    threads = [threading.Thread(target=follow) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert texts == [expected["choices"][0]["text"]] * 16


def test_the_report_counts_to_the_stop_string(url):
    """As the usage does, however many tokens a fast worker has drawn until the router hears of it."""
    with httpx.Client(base_url=url) as client:

        def complete(**fields) -> dict:
            body = {"prompt": [5, 6, 7], "ignore_eos": True, "temperature": 0} | fields
            return client.post("/v1/completions", json=body).json()

        def reported() -> int:
            return client.get("/v1/report").json()["total"]["generated_tokens"]

        stop = complete(max_tokens=30)["choices"][0]["text"][9:13]
        before = reported()
        counted = sum(complete(max_tokens=8000, stop=stop)["usage"]["completion_tokens"] for _ in range(5))
        assert 0 < counted < 200 and reported() - before == counted


def test_stopping_does_not_wait_for_streams(folder):
    with serving(folder, fake="0,0.01", workers=1) as frontend:
        body = {"prompt": "x", "max_tokens": 5000, "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=frontend.url) as client:
            with client.stream("POST", "/v1/completions", json=body) as response:
                next(response.iter_lines())
                began = time.monotonic()
                frontend._server.should_exit = True
                frontend._thread.join(30)
                assert not frontend._thread.is_alive() and time.monotonic() - began < 30, "far from 5000 steps"
