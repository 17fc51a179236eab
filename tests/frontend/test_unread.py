"""What waits for clients over HTTP that do not read is bounded by bytes, for each tenant."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
from collections.abc import Iterator

import httpx
import pytest

from radixrt.client import Client
from radixrt.frontend.http import outbox, unread
from radixrt.frontend.http.outbox import Outbox
from radixrt.frontend.http.unread import Claim, Unread
from radixrt.messages import Sampling
from tests.frontend.conftest import serving
from tests.waiting import eventually

MB = 1 << 20


class Connection:
    """With so many bytes in its buffer."""

    def __init__(self, all: Unread, tenant: str = "t") -> None:
        self.size, self.closed = 0, False
        self.claim = Claim(all, lambda: self.size, self._close)
        self.claim.tenant = tenant

    def _close(self) -> None:
        self.closed = True

    def fill(self, size: int) -> None:
        self.size = size
        self.claim.look()


def test_the_connection_with_most_bytes_is_closed_beyond_the_limit(caplog):
    all = Unread()
    connections = [Connection(all) for _ in range(30)]
    other = Connection(all, "other")
    other.fill(100 * MB)
    for number, one in enumerate(connections):
        one.fill((number % 10 + 1) * MB)
    closed = [one for one in connections if one.closed]
    assert all.total("t") <= unread.MAX_TENANT_UNREAD_BYTES and all.total("other") == 100 * MB
    assert min(one.size for one in closed) >= 9 * MB and not other.closed
    assert len(caplog.records) == len(closed) and "of tenant t does not read" in caplog.text


def test_what_was_read_meanwhile_does_not_count():
    all = Unread()
    fast, slow = Connection(all), Connection(all)
    fast.fill(120 * MB)
    fast.size = MB
    slow.fill(20 * MB)
    assert all.total("t") == 21 * MB and not (fast.closed or slow.closed)
    fast.fill(0)
    slow.claim.queue(3 * MB)
    assert all.total("t") == 23 * MB
    slow.claim.move("u")
    assert (all.total("t"), all.total("u")) == (0, 23 * MB)
    slow.claim.end()
    slow.claim.queue(5 * MB)
    assert all.total("u") == 0


def test_one_answer_may_be_of_any_size():
    all = Unread()
    one = Connection(all)
    one.fill(500 * MB)
    assert not one.closed


def test_an_outbox_claims_what_waits():
    all = Unread()
    box, connection = Outbox(), Connection(all)
    box.claim = connection.claim
    box._sending = True
    for _ in range(100):
        box.put(b"x" * 4096)
    assert 300_000 < all.total("t") <= 100 * 4096
    box._sending, box.finished = False, True
    with contextlib.suppress(StopIteration):
        box.part().send(None)
    assert all.total("t") == 0


# ---------------------------------------------------------------- with connections


def slow_reader(url: str, path: str, body: dict | None, key: str) -> socket.socket:
    """Sends a request, and reads nothing."""
    host, port = url.removeprefix("http://").split(":")
    content = b"" if body is None else json.dumps(body).encode()
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {key}"]
    head = "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""])
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect((host, int(port)))
    sock.sendall(head.encode() + content)
    return sock


@pytest.fixture
def served(folder, monkeypatch) -> Iterator:
    monkeypatch.setattr(unread, "MAX_TENANT_UNREAD_BYTES", 24 * MB)
    with serving(folder, workers=1, context=8_000_000, api_key=("a:ka", "b:kb")) as frontend:
        yield frontend


def test_responses_that_nobody_reads_are_bounded_for_a_tenant(served, caplog):
    """They are larger than what the kernel holds of a connection, which may be 4 MB."""
    caplog.set_level(logging.WARNING)
    all, body = (
        served._server.server_state.unread,
        {"input": "x", "max_output_tokens": 1, "metadata": {"a": "x" * (10 * MB)}},
    )
    names = {}
    for key in ("ka", "kb"):
        headers = {"authorization": f"Bearer {key}"}
        names[key] = httpx.post(served.url + "/v1/responses", json=body, headers=headers, timeout=30).json()["id"]
    readers = [slow_reader(served.url, f"/v1/responses/{names['ka']}", None, "ka") for _ in range(20)]
    try:
        eventually(lambda: "of tenant a does not read" in caplog.text)
        eventually(lambda: 12 * MB < all.total("a") <= 24 * MB)
        assert "tenant b" not in caplog.text
        answer = httpx.get(
            f"{served.url}/v1/responses/{names['kb']}", headers={"authorization": "Bearer kb"}, timeout=30
        )
        assert len(answer.content) > 4 * MB
    finally:
        for one in readers:
            one.close()
    eventually(lambda: all.total("a") == 0)


@pytest.mark.slow
def test_streams_that_nobody_reads_are_bounded_for_a_tenant(served, monkeypatch):
    """By what waits in their outboxes as well."""
    monkeypatch.setattr(unread, "MAX_TENANT_UNREAD_BYTES", 2 * MB)
    monkeypatch.setattr(outbox, "CLAIM_BYTES", 16 << 10)
    all = served._server.server_state.unread
    body = {"prompt": "a", "max_tokens": 1_000_000, "ignore_eos": True, "stream": True, "n": 32, "logprobs": 5}
    readers = [slow_reader(served.url, "/v1/completions", body, "ka") for _ in range(4)]
    try:
        with Client(served.url, api_key="ka") as client:
            eventually(lambda: all.total("a") > MB, 20)
            eventually(lambda: len(served._server.server_state.connections) < 5, 20)
            assert client.generate("b", Sampling(max_tokens=4)).usage.completion_tokens == 4
    finally:
        for one in readers:
            one.close()
    eventually(lambda: all.total("a") == 0)
