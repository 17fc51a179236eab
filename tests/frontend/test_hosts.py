"""Which hosts, and which web pages, a request may come from."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest

from radixrt.config import FrontendConfig
from radixrt.frontend.http.errors import ApiError
from radixrt.frontend.http.hosts import Hosts, RequestFilter
from tests.frontend.conftest import serving

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
EVIL = "https://evil.example"


def refusal(hosts: Hosts, value: str) -> int | None:
    try:
        hosts.check(value)
    except ApiError as error:
        assert error.param == "host"
        return error.status
    return None


@pytest.mark.parametrize("bound", ["127.0.0.1", "localhost", "::1", "127.0.0.53"])
def test_a_loopback_server_is_called_by_loopback_names_alone(bound):
    hosts = Hosts(bound, ())
    for good in (
        "localhost",
        "LocalHost:8000",
        "localhost.",
        "127.0.0.1:80",
        "127.9.8.7",
        "[::1]:8000",
        "a.localhost:1",
    ):
        assert refusal(hosts, good) is None, good
    for bad in (
        "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "evillocalhost",
        "192.168.0.7:8000", "0.0.0.0", "[fe80::1]", "10.0.0.1", "127.1", "2130706433",
    ):  # fmt: skip
        assert refusal(hosts, bad) == 403, bad
    for invalid in ("", "a b", "localhost:x", "localhost:1:2", "user@localhost", "localhost/x", "[::1", "ex\tample"):
        assert refusal(hosts, invalid) == 400, invalid


def test_further_hosts_are_allowed_by_name():
    hosts = Hosts("127.0.0.1", ("Box.lan", ".corp.example"))
    assert [refusal(hosts, name) for name in ("box.lan:99", "a.b.corp.example", "localhost")] == [None] * 3
    assert [refusal(hosts, name) for name in ("corp.example", "evilcorp.example", "x.box.lan")] == [403] * 3
    assert refusal(Hosts("127.0.0.1", ("*",)), "evil.example") is None
    lan = Hosts("192.168.0.7", ())
    assert refusal(lan, "evil.example") is None, "keys are needed there"
    assert refusal(lan, "a b") == 400
    assert refusal(Hosts("192.168.0.7", ("box.lan",)), "evil.example") == 403


def answer_to(scope: dict, **config) -> int:
    """The status of a request: 200 if it is passed on."""
    sent = []

    async def app(scope, receive, send):
        sent.append({"status": 200})

    async def send(message):
        sent.append(message)

    asyncio.run(RequestFilter(app, FrontendConfig(**config), ("/reset",))(scope, None, send))
    return sent[0]["status"]


def request(headers: dict[str, str], method: str = "POST", path: str = CHAT, host: str = "localhost:8000", **scope):
    lines = [(b"host", host.encode())] if host else []
    lines += [(name.encode(), value.encode()) for name, value in headers.items()]
    given = {"type": "http", "http_version": "1.1", "scheme": "http", "method": method, "path": path, "headers": lines}
    return given | scope


JSON, TEXT, FORM = "application/json", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded"


@pytest.mark.parametrize("kind", [TEXT, FORM, "multipart/form-data; boundary=x", "", "text/json", "applicationjson"])
@pytest.mark.parametrize(
    "page", [{"origin": EVIL}, {"origin": "null"}, {"origin": "http://localhost:3000"}, {"origin": "http://localhost"},
             {"origin": "chrome-extension://abc"}, {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}]
)  # fmt: skip
def test_a_page_of_others_sends_nothing_that_a_browser_sends_without_asking(kind, page):
    headers = page | ({"content-type": kind} if kind else {})
    assert answer_to(request(headers)) == 403
    assert answer_to(request(headers), allowed_origins=("*",)) == 200
    if origin := page.get("origin"):
        assert answer_to(request(headers), allowed_origins=(EVIL,)) == (200 if origin == EVIL else 403)


@pytest.mark.parametrize("kind", [TEXT, FORM, JSON, ""])
def test_programs_and_the_servers_own_pages_send_what_they_like(kind):
    headers = {"content-type": kind} if kind else {}
    own = {"origin": "http://localhost:8000", "sec-fetch-site": "same-origin"}
    for page in ({}, own, {"sec-fetch-site": "none"}):
        for path in (CHAT, "/reset"):
            assert answer_to(request(headers | page, path=path)) == 200
    assert answer_to(request({"origin": "http://localhost"}, host="localhost:80")) == 200
    assert answer_to(request({"origin": "https://box.lan"}, host="box.lan"), allowed_hosts=("box.lan",)) == 200


def test_a_guarded_path_is_refused_whatever_the_page_sends():
    assert answer_to(request({"origin": EVIL, "content-type": JSON}, path="/reset")) == 403
    assert answer_to(request({"origin": EVIL, "content-type": JSON})) == 200, "a browser asks first, and is told no"
    assert answer_to(request({"origin": EVIL, "content-type": "application/vnd.x+json; charset=utf-8"})) == 200
    assert answer_to(request({"origin": EVIL}, method="GET")) == 200


def test_websockets_are_not_served(url):
    host, port = url.removeprefix("http://").split(":")
    offer = "Connection: Upgrade\r\nUpgrade: {}\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAA==\r\n"
    for kind, status in (("websocket", b"400"), ("h2c", b"200")):
        assert raw(host, port, f"GET /health HTTP/1.1\r\nHost: {host}\r\n{offer.format(kind)}\r\n")[9:12] == status


def raw(host: str, port: str, text: str) -> bytes:
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(text.encode())
        return sock.recv(65536)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /health HTTP/1.1\r\n", 400),
        ("GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n", 400),
        ("GET /health HTTP/1.1\r\nHost: localhost\r\nHOST: evil.example\r\n", 400),
        ("GET /health HTTP/1.1\r\nHost: a b\r\n", 400),
        ("GET /health HTTP/1.1\r\nHost: evil.example\r\n", 403),
        ("GET /health HTTP/1.0\r\n", 200),
        ("GET /health HTTP/1.0\r\nHost: evil.example\r\n", 403),
        ("GET /health HTTP/1.1\r\nHost: 127.0.0.1:1\r\n", 200),
    ],
)
def test_each_request_has_one_host(url, head, status):
    host, port = url.removeprefix("http://").split(":")
    assert int(raw(host, port, head + "\r\n")[9:12]) == status


def test_a_refusal_has_the_format_of_the_routes_api(url):
    answer = httpx.post(url + CHAT, json=HELLO, headers={"host": "evil.example"})
    assert answer.status_code == 403 and answer.json()["error"]["param"] == "host"
    answer = httpx.post(url + "/v1/messages", json=HELLO, headers={"host": "evil.example"})
    assert answer.status_code == 403 and answer.json()["type"] == "error"


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/flush_cache", "/v1/native"])
def test_pages_of_others_empty_no_cache(url, path):
    body = b'{"type": "clear_cache", "id": 1}' if path == "/v1/native" else b""
    for headers in ({"origin": EVIL}, {"origin": EVIL, "content-type": JSON}, {"sec-fetch-site": "cross-site"}):
        assert httpx.post(url + path, content=body, headers=headers).status_code == 403
    assert httpx.post(url + path, content=body, headers={"origin": url}).status_code == 200
    assert httpx.post(url + path, content=body).status_code == 200


def test_pages_that_are_allowed_get_answers_by_text(folder):
    with serving(folder, workers=1, allowed_origins=(EVIL,)) as frontend:
        body = '{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}'
        for origin, status in ((EVIL, 200), ("https://other.example", 403)):
            answer = httpx.post(frontend.url + CHAT, content=body, headers={"origin": origin, "content-type": TEXT})
            assert answer.status_code == status
