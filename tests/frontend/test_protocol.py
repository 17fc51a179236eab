"""Clients that are silent, do not read, or leave: what becomes of their connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
import uvicorn
import uvloop
from uvicorn.server import ServerState

from radixrt.frontend.protocol import PatientProtocol

PATIENCE = 0.1
PART = b"x" * 65536


class App:
    """Answers `/whole` with 64 KiB for each byte of the body, `/stream` without end, `/wait` when it is told to."""

    def __init__(self) -> None:
        self.running = self.left = 0
        self.go = asyncio.Event()

    async def __call__(self, scope, receive, send) -> None:
        self.running += 1
        try:
            await self.answer(scope["path"], receive, send)
        finally:
            self.running -= 1

    async def answer(self, path: str, receive, send) -> None:
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left += 1
                return
            size, more = size + len(message["body"]), message["more_body"]
        leaving = asyncio.ensure_future(receive())
        if path == "/wait":
            going = asyncio.ensure_future(self.go.wait())
            await asyncio.wait([leaving, going], return_when=asyncio.FIRST_COMPLETED)
            going.cancel()
        if path == "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while not leaving.done():
                await send({"type": "http.response.body", "body": PART, "more_body": True})
        if leaving.done():
            self.left += leaving.result()["type"] == "http.disconnect"
            return
        leaving.cancel()
        answer = PART * size if path == "/whole" else b"done"
        headers = [(b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


class Stuck:
    """A transport with something to be written."""

    def __init__(self, done: list[str]) -> None:
        self.close, self.abort = (lambda: done.append("close")), (lambda: done.append("abort"))


class Server:
    """The protocol on a port of this machine."""

    def __init__(self, app: App) -> None:
        self.app, self.state = app, ServerState()
        config = uvicorn.Config(app, lifespan="off", log_config=None, proxy_headers=False)
        config.timeout_keep_alive = PATIENCE  # type: ignore[assignment]
        self.make = lambda: PatientProtocol(config, self.state, {})

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        return await asyncio.open_connection(sock=sock, limit=4096)

    async def eventually(self, condition) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(PATIENCE / 10)

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Server]:
        listener = await asyncio.get_running_loop().create_server(self.make, "127.0.0.1", 0)
        self.port = listener.sockets[0].getsockname()[1]
        async with listener:
            yield self
            await self.eventually(lambda: not self.state.connections and not self.app.running)


def served(test):
    """Run a test on uvloop, with a server that has nothing in flight in the end."""

    def run(**given) -> None:
        async def main() -> None:
            async with Server(App()).listening() as server:
                await test(server, **given)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def head(path: str, length: int, *more: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: h", f"Content-Length: {length}", *more, "", ""]).encode()


SILENT = {
    "nothing": b"",
    "part of a head": head("/", 3)[:20],
    "part of a body": head("/", 3) + b"a",
    "part of a second head": head("/", 0) + head("/", 0)[:20],
    "part of a second body": head("/", 0) + head("/", 3) + b"a",
    "an answer": head("/", 0),
}


@pytest.mark.parametrize("sent", SILENT.values(), ids=SILENT)
def test_a_silent_client(sent):
    @served
    async def test(server: Server) -> None:
        reader, writer = await server.connect()
        writer.write(sent)
        async with asyncio.timeout(10):
            await reader.read(-1)
        writer.close()

    test()


@pytest.mark.parametrize("path", ["/stream", "/whole"])
@pytest.mark.parametrize("more", [[], ["Connection: close"]])
def test_a_client_that_does_not_read(path, more):
    @served
    async def test(server: Server) -> None:
        _, writer = await server.connect()
        writer.transport.pause_reading()
        writer.write(head(path, 200, *more) + b"a" * 200)
        await server.eventually(lambda: server.state.connections)
        await server.eventually(lambda: not server.state.connections)
        assert server.app.left == (path == "/stream")
        writer.transport.abort()

    test()


@served
async def test_who_waits_or_is_slow_is_waited_for(server: Server) -> None:
    """The server's turn may take long, and a client may take its time."""
    reader, writer = await server.connect()
    writer.write(head("/wait", 0))
    await asyncio.sleep(5 * PATIENCE)
    server.app.go.set()
    assert (await reader.readuntil(b"done")).startswith(b"HTTP/1.1 200")
    writer.write(head("/whole", 20))
    for _ in range(20):
        writer.write(b"a")
        await asyncio.sleep(PATIENCE / 4)
    await reader.readuntil(b"\r\n\r\n")
    left = 20 * len(PART)
    while left:
        left -= len(await reader.readexactly(min(left, len(PART))))
        await asyncio.sleep(PATIENCE / 4)
    writer.close()


@served
async def test_what_counts_as_moving(server: Server) -> None:
    """An answer begins the time anew, and so does a client that has read enough for more to be written."""
    reader, writer = await server.connect()
    writer.write(head("/", 0))
    await reader.readuntil(b"done")
    (protocol,) = server.state.connections
    protocol._unset_keepalive_if_required()
    protocol._timer.cancel()
    protocol._moved -= 10 * PATIENCE
    protocol.on_response_complete()
    protocol._unset_keepalive_if_required()
    protocol._look()
    assert not protocol.transport.is_closing()
    protocol._timer.cancel()
    protocol._bytes_unread = lambda: 7
    for _ in range(2):
        protocol.pause_writing()
        protocol._look()
        protocol._timer.cancel()
        protocol.resume_writing()
    assert not protocol.transport.is_closing()
    protocol.pause_writing()
    protocol._look()
    protocol._timer.cancel()
    protocol._look()
    assert protocol.transport.is_closing()
    writer.close()


@served
async def test_the_rest_of_an_answer_that_is_not_read(server: Server) -> None:
    """To close waits until it is read: at the second look that is over."""
    reader, writer = await server.connect()
    writer.write(head("/", 0))
    await reader.readuntil(b"done")
    (protocol,) = server.state.connections
    protocol._timer.cancel()
    aborted = []
    protocol._bytes_unread = lambda: 7
    protocol._moved -= 10 * PATIENCE
    transport, protocol.transport = protocol.transport, Stuck(aborted)
    for closed in (["close"], ["close", "abort"]):
        protocol._look()
        protocol._timer.cancel()
        assert aborted == closed
    transport.abort()
    writer.close()


@pytest.mark.parametrize("behind", [0, 3])
def test_a_client_that_leaves(behind):
    """The request that is answered hears of it, whatever was sent behind it; those behind it are never begun."""

    @served
    async def test(server: Server) -> None:
        _, writer = await server.connect()
        writer.write(head("/wait", 0) * (1 + behind))
        await server.eventually(lambda: server.app.running)
        writer.transport.abort()
        await server.eventually(lambda: not server.app.running)
        assert server.app.left == 1
        server.app.go.set()
        assert server.state.total_requests == 0

    test()
