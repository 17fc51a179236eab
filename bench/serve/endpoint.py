"""A minimal client for HTTP/1.1 and server-sent events, as much as OpenAI's streams need."""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import Any
from urllib.parse import urlsplit

import msgspec

clock = time.perf_counter


class Answer(msgspec.Struct):
    """The result of one request. Times are in seconds of the same clock."""

    sent: float
    """When the request was sent; before connecting, if there was no free connection."""
    first: float
    """When the first chunk with a choice arrived, with or without text, as a token need not be a whole character.
    Servers that send no chunks for tokens without text seem later here; then `chunks` is smaller, too."""
    last: float
    """When the last chunk with a choice arrived."""
    chunks: int
    """Chunks with a choice; equals the number of tokens if each is sent on its own."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    """None if the server does not report it."""
    digest: str
    """A hash of the text."""


class RunFailed(RuntimeError):
    """A request was refused, or a response violates the protocol."""


# ---------------------------------------------------------------- what the server sends


class Choice(msgspec.Struct):
    text: str | None = None


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptDetails | None = None


class Event(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_event = msgspec.json.Decoder(Event)


class Stream:
    """Parses the server-sent events of one response, which arrive in arbitrary pieces."""

    def __init__(self) -> None:
        self._rest = b""
        self._first = self._last = 0.0
        self._chunks = 0
        self._usage: Usage | None = None
        self._text = hashlib.sha256()

    def feed(self, payload: bytes, now: float) -> None:
        lines = (self._rest + payload).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now)

    def _take(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            return
        event = _event.decode(data)
        if event.error is not None:
            raise RunFailed(f"the stream ended with {event.error}")
        if event.choices:
            self._first, self._last = self._first or now, now
            self._chunks += 1
            self._text.update((event.choices[0].text or "").encode())
        self._usage = event.usage or self._usage

    def answer(self, sent: float) -> Answer:
        usage = self._usage
        if usage is None or not self._first:
            raise RunFailed("the stream ended without a choice, or without the usage that was asked for")
        details = usage.prompt_tokens_details
        return Answer(
            sent=sent,
            first=self._first,
            last=self._last,
            chunks=self._chunks,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens or 0,
            cached_tokens=details.cached_tokens if details else None,
            digest=self._text.hexdigest(),
        )


# ---------------------------------------------------------------- HTTP


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection, with one request at a time. `_step` parses the next part of a response: its head, a
    chunk, or a body of known length. It returns False if it needs more bytes, or the response has ended."""

    def __init__(self) -> None:
        self.reusable = True
        self.closed_unheard = False
        """Whether the server closed it before it sent any byte of a response."""
        self._unheard = True
        self._buffer = bytearray()
        self._done: asyncio.Future[Stream] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def connection_lost(self, _error: Exception | None) -> None:
        self.closed_unheard = self._unheard
        self._fail("the server closed the connection")

    def close(self) -> None:
        self._transport.close()

    def send(self, request: bytes) -> asyncio.Future[Stream]:
        self._stream, self._step, self._refusal, self._unheard = Stream(), self._head, b"", True
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        now = clock()
        self._unheard = False
        self._buffer += data
        try:
            while self._step(now):
                pass
        except (ValueError, msgspec.MsgspecError, RunFailed) as error:
            self._fail(str(error))

    def _head(self, _now: float) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = bytes(self._buffer[:end]).lower()
        del self._buffer[: end + 4]
        headers = dict(line.split(b":", 1) for line in head.split(b"\r\n")[1:])
        self._status = int(head.split(b" ", 2)[1])
        self.reusable = headers.get(b"connection", b"").strip() != b"close"
        self._length = int(headers.get(b"content-length", 0))
        chunked = headers.get(b"transfer-encoding", b"").strip() == b"chunked"
        if not chunked and b"content-length" not in headers:
            raise RunFailed("an answer without a length, neither chunked nor counted")
        self._step = self._chunk if chunked else self._counted
        return True

    def _chunk(self, now: float) -> bool:
        line = self._buffer.find(b"\r\n")
        if line < 0:
            return False
        size = int(self._buffer[:line].split(b";")[0], 16)
        end = line + 2 + size
        if len(self._buffer) < end + 2:
            return False
        payload = bytes(self._buffer[line + 2 : end])
        del self._buffer[: end + 2]
        if not size:
            return self._finish()
        self._payload(payload, now)
        return True

    def _counted(self, now: float) -> bool:
        if len(self._buffer) < self._length:
            return False
        payload = bytes(self._buffer[: self._length])
        del self._buffer[: self._length]
        self._payload(payload, now)
        return self._finish()

    def _payload(self, payload: bytes, now: float) -> None:
        if self._status == 200:
            self._stream.feed(payload, now)
        else:
            self._refusal += payload

    def _finish(self) -> bool:
        if self._status != 200:
            raise RunFailed(f"status {self._status}: {self._refusal.decode(errors='replace')[:500]}")
        assert self._done is not None
        if not self._done.done():
            self._done.set_result(self._stream)
        return False

    def _fail(self, reason: str) -> None:
        self.reusable = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(RunFailed(reason))


class Endpoint:
    """A pool of connections to one server; the one that was used last is reused first."""

    def __init__(self, url: str) -> None:
        self._host, self._port, path = split_url(url)
        lines = [f"POST {path}/v1/completions HTTP/1.1", f"host: {self._host}", "content-type: application/json"]
        self._head = "\r\n".join(lines).encode()
        self._idle: list[Connection] = []

    def request(self, body: bytes, api_key: str) -> bytes:
        """The bytes of a request."""
        key = f"\r\nauthorization: Bearer {api_key}".encode() if api_key else b""
        return b"%b%b\r\ncontent-length: %d\r\n\r\n%b" % (self._head, key, len(body), body)

    async def post(self, request: bytes) -> Answer:
        """Send a request, and wait for its answer. Cancelled, the connection is closed, so that the server stops.
        Raises RunFailed; OSError if there is no connection."""
        sent = clock()
        while (connection := self._kept()) is not None:
            try:
                return await self._exchange(connection, request, sent)
            except RunFailed:
                # Servers close connections that were idle for some seconds, also just when a request is sent.
                if not connection.closed_unheard:
                    raise
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self._host, self._port)
        return await self._exchange(connection, request, sent)

    async def _exchange(self, connection: Connection, request: bytes, sent: float) -> Answer:
        try:
            answer = (await connection.send(request)).answer(sent)
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return answer

    def _kept(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
            connection.close()
        return None

    def close(self) -> None:
        for connection in self._idle:
            connection.close()


def split_url(url: str) -> tuple[str, int, str]:
    """Split http://HOST:PORT[/PATH][/v1] into (host, port, path before /v1). Raises ValueError for other URLs."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(f"url: expected http://HOST:PORT, got {url}")
    return parts.hostname, parts.port or 80, parts.path.rstrip("/").removesuffix("/v1")
