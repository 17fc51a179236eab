"""What waits for clients that do not read is bounded by bytes, by client and by tenant, and they are disconnected."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq
from sim_workers import ids
from stack import stack

from radixrt import wire
from radixrt.messages import ClientReply, Done, Error, Generate, Info, Recall, Sampling, Share, TokenPrompt
from radixrt.router.server import backlogs, handlers
from radixrt.router.server.backlogs import Backlogs
from radixrt.wire import event_loop
from tests.waiting import eventually

MB = 1 << 20
_reply = wire.Decoder(ClientReply)


class Marks:
    """Clients to which marks are sent; each leaves when it is read."""

    def __init__(self) -> None:
        self.all = Backlogs()
        self._read: dict[bytes, list[list[bool]]] = {}

    def send(self, client: bytes, size: int, tenant: str = "t") -> bool:
        backlog = self.all.of(client)
        backlog.tenant = tenant
        if not self.all.admits(client, backlog, size):
            backlog.exceeded = True
            return False
        left = [False]
        self._read.setdefault(client, []).append(left)
        backlog.mark(size, lambda: left[0])
        return True

    def read(self, client: bytes) -> None:
        self._read[client].pop(0)[0] = True

    def waiting(self) -> int:
        return sum(backlog.waiting for backlog in self.all._waiting.values())


@pytest.fixture
def now(monkeypatch) -> list[float]:
    at = [1000.0]
    monkeypatch.setattr(backlogs.time, "monotonic", lambda: at[0])
    return at


def test_a_client_that_reads_gets_any_number_of_bytes():
    marks = Marks()
    for _ in range(100):
        assert marks.send(b"a", 50 * MB)
        marks.read(b"a")
    assert marks.send(b"a", 500 * MB), "a single message may be of any size"


def test_bytes_of_a_client_and_of_a_tenant_are_bounded():
    marks = Marks()
    assert [marks.send(b"a", 20 * MB) for _ in range(5)] == [True] * 3 + [False] * 2
    marks.read(b"a")
    assert marks.send(b"a", 20 * MB)
    for number in range(200):
        for _ in range(10):
            marks.send(b"%d" % number, 10 * MB)
    assert marks.waiting() <= backlogs.MAX_TENANT_UNREAD_BYTES
    assert not marks.send(b"new", 10 * MB) and marks.send(b"new", MB // 4), "to one that reads, small ones are sent"
    assert marks.send(b"other", 60 * MB, "other") and not marks.send(b"other", 60 * MB, "other")


def test_who_does_not_read_is_found_and_who_is_slow_is_not(now):
    marks = Marks()
    for client in (b"deaf", b"slow", b"small"):
        marks.send(client, MB)
    marks.send(b"slow", MB)
    assert not marks.send(b"deaf", 64 * MB) and not marks.send(b"slow", 64 * MB)
    now[0] += backlogs.STALLED_SECONDS - 1
    marks.read(b"slow")
    assert [*marks.all.stalled()] == []
    now[0] += 2
    ((client, backlog),) = marks.all.stalled()
    assert client == b"deaf" and backlog.waiting == MB
    backlog.gone = True
    now[0] += backlogs.UNREAD_SECONDS
    assert [client for client, _ in marks.all.stalled()] == [b"slow", b"small"]
    marks.read(b"small")
    now[0] += backlogs.IDLE_SECONDS
    assert [client for client, _ in marks.all.stalled()] == [b"slow"]
    assert marks.waiting() == 2 * MB, "what waits for one that was disconnected counts until it is dropped"
    marks.read(b"deaf")
    marks.read(b"slow")
    assert [*marks.all.stalled()] == [] and marks.all._all.keys() == {b"slow", b"small"}
    now[0] += backlogs.IDLE_SECONDS + 1
    assert [*marks.all.stalled()] == [] and not marks.all._all, "those that are idle are forgotten"


# ---------------------------------------------------------------- with sockets


class Deaf:
    """A client that asks, and does not read."""

    def __init__(self, address: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger, self.socket.rcvhwm, self.socket.rcvbuf = 0, 1, 4096
        self.socket.connect(address)

    def send(self, *messages) -> None:
        for message in messages:
            self.socket.send(wire.encode(message))

    def receive(self):
        assert self.socket.poll(10_000), "no answer"
        return _reply.decode(self.socket.recv())


@contextmanager
def deaf(address: str) -> Iterator[Deaf]:
    client = Deaf(address)
    try:
        yield client
    finally:
        client.socket.close()


@pytest.fixture
def limits(monkeypatch):
    monkeypatch.setattr(backlogs, "MAX_UNREAD_BYTES", 16 * MB)
    monkeypatch.setattr(backlogs, "MAX_TENANT_UNREAD_BYTES", 24 * MB)
    monkeypatch.setattr(backlogs, "STALLED_SECONDS", 0.5)
    monkeypatch.setattr(event_loop, "UNREAD_MILLISECONDS", 1000)


def waiting(server) -> int:
    return sum(backlog.waiting for backlog in list(server._clients._backlogs._all.values()))


def test_a_client_that_does_not_read_recalls_is_disconnected(limits, caplog):
    caplog.set_level(logging.WARNING)
    with stack(client_address="tcp://127.0.0.1:*", worker_timeout=0.8, api_key=("a:key", "b:other")) as (
        router,
        _,
        client,
    ):
        server = router.server
        assert client.ask(Share(id=1, entries=[(b"k", bytes(4 * MB))], api_key="key")) == Done(1)
        with deaf(server.client_address) as one:
            one.send(Generate(id=1, prompt=TokenPrompt(ids(1)), sampling=Sampling(max_tokens=3000), api_key="key"))
            eventually(lambda: server.core.runs_in_flight)
            one.send(*(Recall(id=i, keys=[b"k"], api_key="key") for i in range(2, 60)))
            eventually(lambda: waiting(server))
            assert waiting(server) <= 16 * MB
            eventually(lambda: "disconnected" in caplog.text, 10)
            assert caplog.text.count("a client of tenant a does not read") == 1
            eventually(lambda: not server.core.runs_in_flight and not waiting(server))
        assert client.ask(Recall(id=2, keys=[b"k"], api_key="key")) == Info(2, [bytes(4 * MB)])


def test_many_clients_of_a_tenant_have_a_bound_together_and_others_are_served(limits):
    with stack(client_address="tcp://127.0.0.1:*", worker_timeout=60.0, api_key=("a:key", "b:other")) as (
        router,
        _,
        client,
    ):
        server = router.server
        for id, key in ((1, "key"), (2, "other")):
            assert client.ask(Share(id=id, entries=[(b"k", bytes(4 * MB))], api_key=key)) == Done(id)
        crowd = [Deaf(server.client_address) for _ in range(12)]
        try:
            for one in crowd:
                one.send(*(Recall(id=i, keys=[b"k"], api_key="key") for i in range(4)))
            eventually(lambda: waiting(server) >= 16 * MB)
            assert client.ask(Recall(id=3, keys=[b"k"], api_key="other")) == Info(3, [bytes(4 * MB)])
            assert waiting(server) <= 28 * MB, "with those of the other, which has read them"
            answers = [crowd[-1].receive() for _ in range(4)]
            refused = [answer for answer in answers if isinstance(answer, Error)]
            assert refused and all((one.code, one.retry_after) == (503, 1.0) for one in refused)
        finally:
            for one in crowd:
                one.socket.close()


def test_a_recall_has_a_bound(monkeypatch):
    monkeypatch.setattr(handlers, "MAX_RECALL_BYTES", 1000)
    with stack() as (_, _, client):
        assert client.ask(Share(id=1, entries=[(b"a", bytes(600)), (b"b", bytes(600)), (b"c", bytes(2000))])) == Done(1)
        assert client.ask(Recall(id=2, keys=[b"c"])) == Info(2, [bytes(2000)])
        refused = client.ask(Recall(id=3, keys=[b"a", b"b"]))
        assert (refused.code, refused.field) == (400, "keys")
