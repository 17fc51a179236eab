"""Clients that are silent, do not read, or leave: what becomes of their connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterable
from types import SimpleNamespace

import pytest
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from radixrt.frontend.http.protocol import LEAVING, MAX_HEAD_BYTES, PatientProtocol

PATIENCE = 60.0
"""Seconds after which a server here ends a silent connection: so many that no busy machine is taken for one."""
SHORT = 0.1
"""The same where a test waits for that."""
PART = b"x" * 65536


class App:
    """Answers `/whole` with 64 KiB for each byte of the body, `/stream` without end, `/wait` when it is told to."""

    def __init__(self) -> None:
        self.running = self.left = 0
        self.heard = b""
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
            self.heard += message["body"]
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

    def __init__(self, app: App, patience: float) -> None:
        self.app, self.state = app, ServerState()
        config = uvicorn.Config(app, lifespan="off", ws="none", log_config=None, proxy_headers=False)
        config.timeout_keep_alive = patience  # type: ignore[assignment]
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
                await asyncio.sleep(0.01)

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Server]:
        listener = await asyncio.get_running_loop().create_server(self.make, "127.0.0.1", 0)
        self.port = listener.sockets[0].getsockname()[1]
        async with listener:
            yield self
            await self.eventually(lambda: not self.state.connections and not self.app.running)


def served(test, patience: float = PATIENCE):
    """Run a test on uvloop, with a server that has nothing in flight in the end."""

    def run(**given) -> None:
        async def main() -> None:
            async with Server(App(), patience).listening() as server:
                await test(server, **given)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def soon_tired(test):
    """`served`, by a server that waits for no silent client."""
    return served(test, SHORT)


def passed(protocol: PatientProtocol, seconds: float) -> None:
    """Let a connection look whether its client is still there, as if nothing had moved for `seconds`."""
    protocol._moved -= seconds
    protocol._timer.cancel()
    protocol._look()
    protocol._timer.cancel()


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
    @soon_tired
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
    @soon_tired
    async def test(server: Server) -> None:
        _, writer = await server.connect()
        writer.transport.pause_reading()
        writer.write(head(path, 200, *more) + b"a" * 200)
        await server.eventually(lambda: server.state.connections)
        await server.eventually(lambda: not server.state.connections and not server.app.running)
        assert server.app.left == (path == "/stream")
        writer.transport.abort()

    test()


@served
async def test_who_waits_or_is_slow_is_waited_for(server: Server) -> None:
    """The server's turn may take long, and a client may take its time."""
    reader, writer = await server.connect()
    writer.write(head("/wait", 0))
    await server.eventually(lambda: server.app.running)
    (protocol,) = server.state.connections
    passed(protocol, 5 * PATIENCE)
    server.app.go.set()
    assert (await reader.readuntil(b"done")).startswith(b"HTTP/1.1 200")
    writer.write(head("/whole", 20))
    for _ in range(20):
        passed(protocol, PATIENCE / 2)
        before = protocol._moved
        writer.write(b"a")
        await server.eventually(lambda before=before: protocol._moved > before)
    await reader.readuntil(b"\r\n\r\n")
    left = 20 * len(PART)
    while left:
        left -= len(await reader.readexactly(min(left, len(PART))))
        if server.state.connections:  # it is closed as soon as the kernel has the rest
            passed(protocol, PATIENCE / 2)
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


class Noted:
    """The transport of a connection, of which each write is noted."""

    def __init__(self, transport: asyncio.Transport, writes: list[bytes]) -> None:
        self._transport, self._writes = transport, writes

    def write(self, data: bytes) -> None:
        self._writes.append(data)
        self._transport.write(data)

    def writelines(self, parts: Iterable[bytes]) -> None:
        self.write(b"".join(parts))

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)


async def connect_noted(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, list[bytes]]:
    """A connection, and what the server writes to it."""
    reader, writer = await server.connect()
    await server.eventually(lambda: server.state.connections)
    (protocol,) = server.state.connections
    writes: list[bytes] = []
    protocol.transport = Noted(protocol.transport, writes)
    return reader, writer, writes


@pytest.mark.parametrize("more", [[], ["Connection: close"]])
def test_the_head_leaves_with_the_body(more):
    @served
    async def test(server: Server) -> None:
        reader, writer, writes = await connect_noted(server)
        writer.write(head("/", 0, *more))
        await reader.readuntil(b"done")
        assert len(writes) == 1 and writes[0].endswith(b"\r\n\r\ndone")
        writer.close()

    test()


@served
async def test_a_head_without_a_body_leaves_too(server: Server) -> None:
    reader, writer, writes = await connect_noted(server)
    writer.write(b"HEAD" + head("/", 0).removeprefix(b"POST"))
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    assert len(writes) == 1
    writer.write(head("/", 0))
    assert (await reader.readuntil(b"done")).count(b"\r\n\r\n") == 1
    writer.close()


@served
async def test_a_client_that_asks_first_is_told_to_go_on(server: Server) -> None:
    reader, writer = await server.connect()
    writer.write(head("/", 1, "Expect: 100-continue"))
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"a")
    await reader.readuntil(b"done")
    writer.close()


OFFER = "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAMAAABk"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("name", ["Upgrade", "upgrade"])
def test_an_offer_of_another_protocol_is_not_taken_up(name, size):
    """As Java's client and curl make one: a body that comes with it is read, whatever it says, and wherever the request
    is cut; after an empty line, too."""

    @served
    async def test(server: Server) -> None:
        reader, writer = await server.connect()
        writer.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        body = b"\r\nUpgrade: h2c\r\n\r\n"
        sent = b"\r\n" + head("/whole", len(body), *OFFER, f"{name}: h2c", "Upgrade-Insecure-Requests: 1") + body
        for _ in range(2):
            for at in range(0, len(sent), size):
                writer.write(sent[at : at + size])
                await asyncio.sleep(0)
            said = await reader.readuntil(b"\r\n\r\n")
            assert f"content-length: {len(body) * len(PART)}".encode() in said.lower()
            await reader.readexactly(len(body) * len(PART))
        assert server.app.heard == 2 * body
        writer.close()

    test()


def test_heads_are_told_from_bodies_wherever_they_are_cut(monkeypatch):
    """All that the parser is given is what came, but for the name of the header."""
    told: list[bytes] = []
    monkeypatch.setattr(HttpToolsProtocol, "data_received", lambda _, data: told.append(data))
    sent = head("/", 3, *OFFER, "UPGRADE: h2c", "x-upgrade: a", "Up: b").replace(b"POST", b"\r\n\r\nPOST") + b"abc"
    expected = sent.replace(b"UPGRADE:", b"ignored:")
    for first in range(1, len(sent)):
        for second in (first, min(first + 3, len(sent))):
            protocol = object.__new__(PatientProtocol)
            protocol.loop, protocol._in_head = SimpleNamespace(time=lambda: 0.0), True
            protocol._past, protocol._held, protocol._head_bytes = b"", b"", 0
            told.clear()
            for part in (sent[:first], sent[first:second], sent[second:]):
                protocol.data_received(part)
            assert b"".join(told) == expected, (first, second)


@served
async def test_an_answer_that_breaks_off(server: Server) -> None:
    """Its head is not kept back: the client sees that there was an answer."""
    server.app.answer = break_off
    reader, writer, _ = await connect_noted(server)
    writer.write(head("/", 0))
    assert (await reader.read(-1)).startswith(b"HTTP/1.1 200")
    writer.close()


async def break_off(path: str, receive, send) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})


@pytest.mark.parametrize("size", [0, 200_000])
def test_who_asks_is_called_when_the_client_leaves(size):
    """Also behind a large body, after which nothing was read; and not for a request that was answered before."""

    @served
    async def test(server: Server) -> None:
        called = []
        go, protocols = server.app.go, server.state.connections

        async def answer(path: str, receive, send) -> None:
            while (await receive()).get("more_body"):
                pass
            (protocol,) = protocols
            protocol.flow.pause_reading()  # as behind a large part of a body
            when_left = protocol._answering.scope["extensions"][LEAVING]
            when_left(lambda: called.append(path))
            assert not protocol.flow.read_paused
            if path == "/wait":
                await go.wait()
                when_left(lambda: called.append("late"))
                return
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})

        server.app.answer = answer
        reader, writer = await server.connect()
        writer.write(head("/first", 0))
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head("/wait", size) + b"a" * size)
        await writer.drain()
        await server.eventually(lambda: protocols and next(iter(protocols))._on_leave)
        (protocol,) = protocols
        writer.transport.abort()
        await server.eventually(lambda: called)
        assert called == ["/wait"]
        protocols.add(protocol)
        go.set()
        await server.eventually(lambda: len(called) > 1)
        assert called == ["/wait", "late"]
        protocols.clear()

    test()


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


def chunked(path: str, *more: str) -> bytes:
    return head(path, 0, *more).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")


def lines(size: int) -> bytes:
    """So many bytes of headers."""
    return (b"a: " + b"b" * 95 + b"\r\n") * (size // 100) + b"c: " + b"d" * (size % 100 + 95) + b"\r\n"


GROWING = {
    "lines": lambda size: b"GET / HTTP/1.1\r\n" + (b"a: b\r\n" * size)[: size - 16],
    "a value": lambda size: b"GET / HTTP/1.1\r\na: " + b"b" * (size - 19),
    "a name": lambda size: b"GET / HTTP/1.1\r\n" + b"a" * (size - 16),
    "a URL": lambda size: b"GET /" + b"a" * (size - 5),
    "empty lines": lambda size: b"\r\n" * (size // 2),
}


async def write_in_parts(writer: asyncio.StreamWriter, sent: bytes, size: int) -> None:
    for at in range(0, len(sent), size):
        writer.write(sent[at : at + size])
        await writer.drain()
        await asyncio.sleep(0)


@pytest.mark.parametrize("size", [1000, 1 << 20])
@pytest.mark.parametrize("before", [b"", head("/", 0)])
@pytest.mark.parametrize("sent", GROWING.values(), ids=GROWING)
def test_a_head_without_end_is_refused(sent, before, size):
    """Right where it is longer than any may be; also behind a request that is answered."""

    @served
    async def test(server: Server) -> None:
        reader, writer = await server.connect()
        if before:
            writer.write(before)
            await reader.readuntil(b"done")
        await write_in_parts(writer, sent(MAX_HEAD_BYTES), size)
        await asyncio.sleep(0.01)
        assert server.state.connections and not reader.at_eof()
        writer.write(b"\r")
        answer = await reader.read(-1)
        assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n") and answer.endswith(b"}}")
        assert b"connection: close\r\n" in answer and server.state.total_requests == bool(before)
        writer.close()

    test()


@pytest.mark.parametrize("size", [1000, 60_000, 1 << 20])
@pytest.mark.parametrize("over", [0, 1])
def test_the_longest_head(over, size):
    """With a body behind it that is longer by far, in the same read or not; the next request has as much to itself."""

    @served
    async def test(server: Server) -> None:
        reader, writer = await server.connect()
        writer.transport.set_write_buffer_limits(1 << 20)
        body = b"Upgrade: a\r\n\r\n" * 7_000
        longest = head("/", len(body), *OFFER, "Upgrade: h2c")
        longest = longest[:-2] + b"a: " + b"b" * (MAX_HEAD_BYTES - len(longest) - 5 + over) + b"\r\n\r\n"
        assert len(longest) == MAX_HEAD_BYTES + over
        for _ in range(2):
            await write_in_parts(writer, longest if over else longest + body, size)
            if over:
                assert (await reader.read(-1)).startswith(b"HTTP/1.1 431 ")
                break
            assert (await reader.readuntil(b"done")).startswith(b"HTTP/1.1 200 ")
        assert server.app.heard == (b"" if over else 2 * body)
        writer.close()

    test()


@pytest.mark.parametrize("size", [1, 999, 1 << 20])
def test_long_heads_that_follow_each_other(size):
    """Each counts for itself, sent before the one before it is answered or not."""

    @served
    async def test(server: Server) -> None:
        reader, writer = await server.connect()
        count, more = (4, 40 << 10) if size > 1 else (2, 2_000)
        request = head("/", 1, *lines(more).decode().split("\r\n")[:-1]) + b"x"
        await write_in_parts(writer, request * count, size)
        for _ in range(count):
            assert (await reader.readuntil(b"done")).startswith(b"HTTP/1.1 200 ")
        writer.write(head("/", 1) + b"x")
        await reader.readuntil(b"done")
        assert server.app.heard == b"x" * (count + 1)
        writer.close()

    test()


@pytest.mark.parametrize("size", [1000, 1 << 20])
@pytest.mark.parametrize("more", ["a head", "trailers", "a trailer"])
def test_a_request_under_way_ends_with_what_is_too_long_behind_it(more, size):
    @served
    async def test(server: Server) -> None:
        reader, writer = await server.connect()
        flood = lines(MAX_HEAD_BYTES) if more != "a trailer" else b"a: " + b"b" * MAX_HEAD_BYTES
        if more == "a head":
            writer.write(head("/wait", 0))
            flood = head("/", 0)[:-2] + flood
        else:
            writer.write(chunked("/wait") + b"3\r\nabc\r\n0\r\n")
        await server.eventually(lambda: server.app.running)
        await write_in_parts(writer, flood[: MAX_HEAD_BYTES + 1], size)
        async with asyncio.timeout(10):
            assert not await reader.read(-1)
        await server.eventually(lambda: not server.app.running)
        assert server.app.left == 1
        writer.close()

    test()


@pytest.mark.parametrize("size", [1, 1000, 1 << 20])
def test_chunks_and_trailers(size):
    """Chunks have any size, wherever they are cut; so have trailers, within the most. Both may come when the request is
    answered."""

    @served
    async def test(server: Server) -> None:
        reader, writer = await server.connect()
        chunk, most = (b"x" * 200_000, 60_000) if size > 1 else (b"x" * 100, 500)
        told = b"%x;a=b\r\n" % len(chunk)
        trailers = b"0\r\n" + lines(most) + b"\r\n"
        for _ in range(2):
            writer.write(chunked("/"))
            for _ in range(2):
                writer.write(told)
                await asyncio.sleep(0.005)  # so that the chunk begins a read
                await write_in_parts(writer, chunk + b"\r\n", size)
            await write_in_parts(writer, trailers, size)
            assert (await reader.readuntil(b"done")).startswith(b"HTTP/1.1 200 ")
        assert server.app.heard == chunk * 4
        server.app.answer = refuse
        writer.write(chunked("/") + told)
        assert (await reader.readuntil(b"no")).startswith(b"HTTP/1.1 401 ")
        for part in (chunk + b"\r\n", told, chunk + b"\r\n", trailers):
            await write_in_parts(writer, part, size)
            await asyncio.sleep(0.005)
        writer.write(head("/", 0))
        assert (await reader.readuntil(b"no")).startswith(b"HTTP/1.1 401 ")
        writer.close()

    test()


async def refuse(path: str, receive, send) -> None:
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


@served
async def test_trailers_of_a_request_that_is_answered(server: Server) -> None:
    """Nothing is said of them, for it has had its answer."""
    server.app.answer = refuse
    reader, writer = await server.connect()
    writer.write(chunked("/") + b"0\r\n")
    await reader.readuntil(b"no")
    await write_in_parts(writer, lines(MAX_HEAD_BYTES)[: MAX_HEAD_BYTES + 1], 1000)
    async with asyncio.timeout(10):
        assert not await reader.read(-1)
    writer.close()


@served
async def test_what_is_no_head_is_so_within_a_long_one(server: Server) -> None:
    reader, writer, writes = await connect_noted(server)
    writer.write(b"GET / HTTP/1.1\r\n" + b"\0" * (MAX_HEAD_BYTES + 1000))  # one read
    assert (await reader.read(-1)).startswith(b"HTTP/1.1 400 ") and len(writes) == 1
    writer.close()
