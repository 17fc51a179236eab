"""Peers that send what no client or worker sends: mutated messages over ZMQ, frames too many or too few, other socket
types, other protocols, and mutated HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec
import zmq

from radixrt import wire
from tests.chaos.mutations import Mutator, flip, truncate

BATCH = 200
"""Messages between two questions whose answers are waited for, so that no queue grows without bound."""
PATIENCE_SECONDS = 60.0
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
"""Of ZMTP/3.0, without security."""
TLS_HELLO = bytes.fromhex("16030100a5010000a10303") + bytes(32) + bytes.fromhex("20") + bytes(32) + b"\x00\x3e" * 30
KINDS = zmq.REQ, zmq.ROUTER, zmq.PUSH, zmq.PULL, zmq.PUB, zmq.SUB, zmq.PAIR, zmq.REP


def send_mutated(
    link: wire.Link, make: Callable[[], bytes], count: int, question: bytes | None, answers: Counter[int | str]
) -> None:
    """Send `count` messages over a link, and read all that is answered. `question`: a valid message, whose answer has
    the id QUESTION_ID; it is sent after each BATCH. Codes of errors are counted in `answers`, and replies that are
    none."""
    for number in range(1, count + 1):
        link.send(make())
        if number % BATCH and number < count:
            continue
        if question is None:
            for payload in link.drain():
                count_answer(payload, answers)
            continue
        link.send(question)
        deadline, answered = time.monotonic() + PATIENCE_SECONDS, False
        while not answered:
            assert time.monotonic() < deadline, "the router does not answer"
            if (payload := link.recv(1.0)) is not None:
                answered = count_answer(payload, answers) == QUESTION_ID


def count_answer(payload: bytes, answers: Counter[int | str]) -> int | None:
    """Count a reply by its code. Returns its id."""
    try:
        answer = _head.decode(payload)
    except msgspec.MsgspecError:
        return None
    if answer.type != "error":
        answers["answered"] += 1
    elif answer.message.startswith("malformed"):
        answers["malformed"] += 1
    else:
        answers[answer.code] += 1
    return answer.id


QUESTION_ID = 1 << 40


class _Answer(msgspec.Struct):
    """The part of a reply that says whether something went wrong."""

    type: str = ""
    id: int | None = None
    code: int = 0
    message: str = ""


_head = msgspec.msgpack.Decoder(_Answer)


# ---------------------------------------------------------------- frames, socket types


def send_frames(address: str, mutator: Mutator, rng: random.Random, count: int) -> None:
    """Send `count` messages of a wrong number of frames, over sockets of all types; nothing is read."""
    context = zmq.Context.instance()
    for _ in range(0, count, 10):
        kind = zmq.DEALER if rng.random() < 0.7 else rng.choice(KINDS)
        with context.socket(kind) as peer:
            peer.linger = 50
            peer.sndtimeo = 20
            if rng.random() < 0.3:
                peer.identity = rng.choice((b"same", b"worker-0", b"\x01", rng.randbytes(200)))
            peer.connect(address)
            for _ in range(10):
                frames = [mutator.mutated() for _ in range(rng.choice((1, 2, 3, 50)))]
                if rng.random() < 0.5:
                    frames.insert(rng.randrange(len(frames) + 1), b"")
                with contextlib.suppress(zmq.ZMQError):
                    peer.send_multipart(frames)


# ---------------------------------------------------------------- other protocols


def frame(body: bytes, flags: int = 0) -> bytes:
    """A frame of ZMTP/3.0."""
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | 2]) + struct.pack(">Q", len(body)) + body


def ready(rng: random.Random) -> bytes:
    """The command READY, with an identity that others have or may guess."""
    identity = rng.choice((b"", b"same", b"worker-0", struct.pack(">BI", 0, 0x6B8B4567 + rng.randrange(8))))
    properties = b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    properties += b"\x08Identity" + struct.pack(">I", len(identity)) + identity
    return frame(b"\x05READY" + properties, 4)


def foreign(mutator: Mutator, older: Mutator, rng: random.Random) -> bytes:
    """What a peer of another protocol, or of a broken ZMTP, sends. Messages in older versions of it are of `older`."""
    kind = rng.randrange(9)
    payload = (older if kind in (0, 1, 5) else mutator).mutated()
    match kind:
        case 0:  # ZMTP/1.0: a length, flags, the body
            parts = [bytes([len(one) + 1, 0]) + one for one in (payload[:250], payload[250:500])]
            return b"\x01\x00" + b"".join(parts)
        case 1:  # ZMTP/1.0 within a request of a web page
            head = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: text/plain\r\n"
            return head + b"Content-Length: %d\r\n\r\n" % (len(payload) + 4) + b"\x01\x00" + payload
        case 2:
            return b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        case 3:
            return TLS_HELLO
        case 4:
            return rng.randbytes(rng.choice((1, 9, 64, 5000)))
        case 5:  # ZMTP/2.0
            return b"\xff" + bytes(8) + b"\x7f\x01\x05" + b"\x00\x00" + frame(payload)
        case 6:
            return GREETING + ready(rng) + frame(payload[:255]) + frame(b"", 1) + frame(payload)
        case 7:
            size = rng.choice((2**63 - 1, 2**64 - 1, 2**31, 65 << 20))
            return GREETING + ready(rng) + b"\x02" + struct.pack(">Q", size) + payload
    whole = GREETING + ready(rng) + frame(payload)
    return flip(rng, whole) if rng.random() < 0.7 else truncate(rng, whole)


def send_foreign(address: str, mutator: Mutator, older: Mutator, rng: random.Random, count: int) -> None:
    """Open `count` connections to a TCP or Unix socket, and send on each what is no ZMTP, or a broken one."""
    waiting: list[socket.socket] = []
    try:
        for _ in range(count):
            peer = _connected(address)
            waiting.append(peer)
            with contextlib.suppress(OSError):
                peer.sendall(foreign(mutator, older, rng))
            if len(waiting) > 20:
                _leave(waiting.pop(0))
    finally:
        for peer in waiting:
            _leave(peer)


def _connected(address: str) -> socket.socket:
    transport, _, place = address.partition("://")
    if transport == "tcp":
        host, _, port = place.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=10)
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(10)
    peer.connect(place.replace("@", "\0", 1))
    return peer


def _leave(peer: socket.socket) -> None:
    with contextlib.suppress(OSError), peer:
        peer.setblocking(False)
        peer.recv(1 << 16)


# ---------------------------------------------------------------- HTTP


class HttpFuzzer:
    """Sends mutated requests, `at_once` at a time, and counts the statuses of answers; requests that were answered with
    a 5xx that is no refusal are in `failed`."""

    REFUSALS = {501, 503, 505}

    def __init__(self, port: int, make: Iterator[tuple[bytes, bool]], at_once: int = 12) -> None:
        """`make` gives (request, whether it is well-formed HTTP, so that its answer is waited for)."""
        self.statuses: Counter[str] = Counter()
        self.failed: list[tuple[bytes, bytes]] = []
        self._port, self._make, self._at_once = port, make, at_once

    def run(self, count: int) -> None:
        asyncio.run(self._run(count))

    async def _run(self, count: int) -> None:
        left = iter(range(count))
        await asyncio.gather(*(self._work(left) for _ in range(self._at_once)))

    async def _work(self, left: Iterator[int]) -> None:
        link: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        for _ in left:
            request, whole = next(self._make)
            try:
                link = link or await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22)
                link[1].write(request)
                async with asyncio.timeout(PATIENCE_SECONDS if whole else 0.05):
                    status, head, body = await _answer(link[0])
                self.statuses[str(status)] += 1
                if status >= 500 and status not in self.REFUSALS:
                    self.failed.append((request, body))
                if whole and b"connection: close" not in head:
                    continue
            except TimeoutError:
                assert not whole, f"no answer in {PATIENCE_SECONDS:.0f} s: {request[:500]!r}"
                self.statuses["waits for more"] += 1
            except (OSError, EOFError, asyncio.LimitOverrunError, ValueError):
                self.statuses["closed"] += 1
            if link is not None:
                link[1].transport.abort()
                link = None
        if link is not None:
            link[1].transport.abort()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes, bytes]:
    """Read an answer: (status, head in lower case, body)."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"transfer-encoding: chunked" in head:
        body = b""
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size + 2)
        await reader.readline()
    else:
        _, found, rest = head.partition(b"content-length: ")
        body = await reader.readexactly(int(rest.split(b"\r\n", 1)[0])) if found else b""
    return int(head[9:12]), head, body


def request(method: str, path: str, body: bytes, key: str, more: str = "") -> bytes:
    """A well-formed request."""
    headers = f"Host: 127.0.0.1\r\nContent-Type: application/json\r\nAuthorization: Bearer {key}\r\n{more}"
    return f"{method} {path} HTTP/1.1\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode("latin-1") + body


HEADERS = (
    b"Host: evil.example", b"Host:", b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked, identity",
    b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: 99999999999999999999", b"Content-Length: 1, 2",
    b"Upgrade: h2c", b"Expect: 100-continue", b"Connection: close, upgrade", b"Content-Encoding: gzip",
    b"X-Radixrt-Depth: 999999999999", b"X-Radixrt-Program: \xff\xfe", b"Authorization: Bearer \xff\x00",
    b"Authorization: Basic eDp5", b"X-Api-Key: \xc3\x28", b"Origin: null", b"Origin: http://evil.example",
    b"Accept: text/html;q=x", b"A" * 70_000 + b": x", b"X: " + b"y" * 70_000, b" folded: x", b"no colon", b": empty",
    b"Content-Type: text/plain; charset=utf-16", b"Range: bytes=0-", b"Cookie: " + b"a=b; " * 500,
)  # fmt: skip
LINES = (
    b"POST /v1/completions HTTP/1.0", b"POST /v1/completions HTTP/9.9", b"PRI * HTTP/2.0", b"OPTIONS * HTTP/1.1",
    b"CONNECT 127.0.0.1:80 HTTP/1.1", b"GET http://evil.example/ HTTP/1.1", b"POST /%00/\xff HTTP/1.1", b"GET / HTTP",
    b"DELETE /v1/responses/../../x HTTP/1.1", b"TRACE / HTTP/1.1", b"POST  /v1/completions  HTTP/1.1", b"\x16\x03\x01",
    b"GET /" + b"a" * 70_000 + b" HTTP/1.1", b"HEAD /health HTTP/1.1", b"PUT /v1/models HTTP/1.1",
)  # fmt: skip


def http_requests(
    mutator: Mutator, posts: list[tuple[str, bytes]], gets: tuple[str, ...], key: str, rng: random.Random
) -> Iterator[tuple[bytes, bool]]:
    """Requests without end, of which most have a mutated body, the others a mutated head; (request, well-formed)."""
    while True:
        path, body = rng.choice(posts)
        kind = rng.random()
        if kind < 0.85:
            yield request("POST", path, mutator.mutated(body), key), True
        elif kind < 0.9:
            yield request("GET", rng.choice(gets), b"", rng.choice((key, key, "", "wrong"))), True
        else:
            yield _mutated_head(request("POST", path, body, key), rng), False


def _mutated_head(whole: bytes, rng: random.Random) -> bytes:
    head, _, body = whole.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    match rng.randrange(6):
        case 0:
            lines[0] = rng.choice(LINES)
        case 1 | 2:
            lines.insert(rng.randrange(1, len(lines) + 1), rng.choice(HEADERS))
        case 3:
            lines.pop(rng.randrange(len(lines)))
        case 4:
            return flip(rng, head) + b"\r\n\r\n" + body
        case 5:
            return truncate(rng, whole)
    return rng.choice((b"\r\n", b"\r\n", b"\r\n", b"\n")).join(lines) + b"\r\n\r\n" + body
