"""Clients that do not read: which of their requests they hear of when they do again."""

from __future__ import annotations

import asyncio

from sim_workers import ids
from stack import Client, stack

from radixrt import wire
from radixrt.messages import (
    ClientReply,
    Delta,
    Deltas,
    Done,
    Error,
    Generate,
    Info,
    Sampling,
    Scored,
    TextPrompt,
    Tokenize,
    TokenPrompt,
    Tokens,
    Usage,
)
from radixrt.router.core.workers import FORGET_SECONDS
from radixrt.router.server import connections
from radixrt.router.server.connections import ClientConnections
from tests.waiting import eventually

_reply = wire.Decoder(ClientReply)


def generate(id: int, max_tokens: int = 8, **fields) -> Generate:
    return Generate(id=id, prompt=TokenPrompt(ids(5, 6, 7)), sampling=Sampling(max_tokens=max_tokens), **fields)


class Socket:
    """Takes so many messages."""

    def __init__(self) -> None:
        self.room = 0
        self.gone = False
        self.taken: list = []

    def send(self, client: bytes, payload: bytes) -> bool:
        if self.gone:
            raise wire.PeerGone
        if self.room == 0:
            return False
        self.room -= 1
        self.taken.append(_reply.decode(payload))
        return True


def make() -> tuple[ClientConnections, Socket]:
    clients = ClientConnections(lambda key: key)
    clients.socket = Socket()
    return clients, clients.socket


def told(socket: Socket) -> list[int]:
    assert all(isinstance(message, Error) and message.code == 503 for message in socket.taken)
    return [message.id for message in socket.taken]


def test_each_request_is_answered_once():
    """Those in flight, and those whose last answer was not taken, whatever that was."""
    clients, socket = make()
    last = Deltas([Delta(1, finish="stop"), Delta(2, ids=b"\0\0\0\0"), Delta(3, finish="length")])
    assert not clients.send(b"c", last, lambda _: [2, 3])
    for answer in (
        Scored(4, [], Usage()),
        Tokens(5),
        Info(6, None),
        Done(7),
        Error(8, 400, "no"),
        Error(None, 400, ""),
    ):
        assert not clients.send(b"c", answer, lambda _: [])
    assert not clients.send(b"c", Deltas([]), lambda _: [9, 4])
    clients.send_owed()
    assert told(socket) == []
    for _ in range(2):
        socket.room = 3
        clients.send_owed()
    assert len(told(socket)) == 6
    socket.room = 100
    clients.send_owed()
    assert sorted(told(socket)) == [1, 2, 3, 4, 5, 6, 7, 8, 9] and not clients._owed


def test_what_is_owed_is_bounded_and_forgotten(monkeypatch):
    monkeypatch.setattr(connections, "MAX_OWED_ERRORS", 5)
    clients, socket = make()
    for id in range(9):
        assert not clients.send(b"c", Info(id, None), lambda _: [])
        assert not clients.send(b"d", Info(id, None), lambda _: [])
    socket.room = 5
    clients.send_owed()
    assert told(socket) == [4, 5, 6, 7, 8], "of the latest"
    socket.gone = True
    clients.send_owed()
    assert not clients._owed
    socket.gone, socket.room = False, 0
    assert not clients.send(b"c", Info(1, None), lambda _: [])
    socket.gone = True
    assert not clients.send(b"c", Info(2, None), lambda _: [])
    assert not clients._owed


def test_no_request_of_a_client_that_reads_again_stays_unanswered(monkeypatch):
    """One that ended while it did not read, one that runs, one that is being encoded."""
    with stack(pace=0.001, worker_timeout=0.4) as (router, _, client):
        server = router.server
        socket, deaf = server._clients.socket, Client(server.client_address)
        send, reads = socket.send, False

        async def wait_for_ever() -> None:
            await asyncio.get_running_loop().create_future()

        monkeypatch.setattr(socket, "send", lambda peer, payload: reads and send(peer, payload))
        monkeypatch.setattr(server.text, "encode_shown", lambda *_, **__: wait_for_ever())
        deaf.send(Tokenize(id=1, prompt=TextPrompt("x")))
        eventually(lambda: len(server._handlers._tasks) == 1)
        deaf.send(generate(2, max_tokens=1, stream=False))
        eventually(lambda: server.core.counters.finished == 1 and not server._handlers._tasks)
        deaf.send(generate(3, max_tokens=4000))
        eventually(lambda: server.core.counters.cancelled == 1)
        reads = True
        assert sorted(deaf.receive().id for _ in range(3)) == [1, 2, 3]
        client.send(generate(4))
        assert client.gather(1)
        deaf.link.close()


def test_a_worker_that_is_forgotten_has_no_link():
    """Names that are drawn anew for each process would otherwise pile up."""
    with stack(worker_timeout=0.2) as (router, (worker,), _):
        worker.die()
        eventually(lambda: not router.server.core.workers)
        workers, member = router.server._workers, router.server.core.workers._lost["w0"]
        assert workers._identities and workers._names
        member.heard -= FORGET_SECONDS
        eventually(lambda: not (workers._identities or workers._names))
