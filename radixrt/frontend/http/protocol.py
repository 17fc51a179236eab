"""The HTTP/1.1 protocol of a connection: uvicorn's, with timeouts for clients that do not send or read."""

from __future__ import annotations

import asyncio
import fcntl
import re
import sys
import termios
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from radixrt.frontend.http.errors import ApiError
from radixrt.frontend.http.unread import UNREAD, Claim, Unread

LEAVING = "radixrt.leaving"
"""A key of a scope's `extensions`: a function that takes a callback for when the client disconnects before it is
answered. Waiting for that in `receive` would need a task, which costs a tenth of a short request's time."""


NAME = b"\nupgrade:"
UPGRADE = re.compile(NAME, re.IGNORECASE)
IGNORED = b"\nignored:"
"""As long as NAME, so that replacing one by the other does not move offsets."""
UPGRADE_HEADER = IGNORED.strip(b"\n:")
"""The name under which a request has what it offers to upgrade to."""
HEAD_END = b"\r\n\r\n"
MAX_HEAD_BYTES = 64 << 10
"""The most bytes of a request's head, or of the trailers after a chunked body. The parser itself has no limit, and
takes quadratic time for a value or URL that arrives in many parts."""

REFUSED_SECONDS = 1.0
"""How long a connection beyond the limit is kept for its request, which gets status 503."""
MAX_PIPELINED = 256
"""The most requests of a connection that wait for the one that is being answered. A read may bring thousands."""
MAX_DISCARDED_BYTES = 32 << 20
"""The most bytes of a body that are read, and thrown away, after its request was answered. A client that sends all of
its body before it reads would not see the answer if the connection were closed at once."""


class AnswerTransport(asyncio.Transport):
    """The connection while one request is answered. It sends the response's head together with the first part of the
    body, as ASGI allows, because each write is a system call and wakes the client."""

    __slots__ = ("_cycle", "_head", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport: asyncio.Transport = cycle.transport
        self._head: bytes | bytearray | memoryview | None = None
        """The head that is held back; empty once it is sent."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._head:
            self._transport.writelines((self._head, data))
            self._head = b""
        elif self._head is None and self._cycle.response_started:  # else it is 100 Continue
            self._head = data
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """The response is complete: send a head that has no body."""
        if self._head:
            self.write(b"")

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class PatientProtocol(HttpToolsProtocol):
    """Closes a connection on which nothing has happened for `timeout_keep_alive` seconds, or up to twice as long, while
    it waits for the client: to send its first request, or the rest of one, or to read what was written. Otherwise each
    such client would hold a socket, and possibly its answer, for as long as it is connected.

    When a client disconnects, the request that is being answered is notified, even if others were pipelined after it.

    A request whose head is too long is refused; if others have to be answered before it, the connection is closed, as
    for trailers that are too long. Bytes that arrive in one read with the end of another request are not counted.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._answering: RequestResponseCycle | None = None
        self._on_leave: Callable[[], None] | None = None
        self._moved = self.loop.time()
        """When the client last sent something, or was last answered."""
        self._in_head = True
        """Whether a request's head, or the rest of one, is to come. `_past` is the end of what the parser has of it;
        `_held` is what the parser will get together with the rest."""
        self._past = self._held = b""
        self._head_bytes: int | None = 0
        """Bytes so far of a head, or of trailers; None in a body."""
        self._discarded = 0
        """Bytes of a body that came after its request was answered."""
        self._unread = 0
        """Bytes that the client had not read at the last check; 0 if something may have been written since."""
        self._timer = self.loop.call_later(self.timeout_keep_alive, self._look)
        state = self.server_state
        unread = getattr(state, "unread", None) or Unread()
        self._claim = Claim(unread, transport.get_write_buffer_size, self._abort)
        if (limit := getattr(state, "connection_limit", None)) is not None and not limit.admits(len(self.connections)):
            self.app = self._refuse_request
            self._timer.cancel()
            self._timer = self.loop.call_later(REFUSED_SECONDS, self._abort)

    async def _refuse_request(self, scope: Any, receive: Any, send: Any) -> None:
        """The ASGI application of a connection for which there is no file to spare."""
        error = ApiError(503, "the server has too many connections", retry_after=REFUSED_SECONDS)
        body = error.body()
        lines = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        lines += [(name.encode(), value.encode()) for name, value in error.headers().items()]
        await send({"type": "http.response.start", "status": error.status, "headers": lines})
        await send({"type": "http.response.body", "body": body})

    def _abort(self) -> None:
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._claim.end()
        self._unset_keepalive_if_required()
        if (cycle := self._answering) is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if self._on_leave is not None:
                self._on_leave()
            self._forget_answering(cycle)
        super().connection_lost(exc)
        # These refer back to this connection: such a cycle, with the unread part of a body, would live until the
        # garbage collector runs, which is seldom.
        self.cycle = self.scope = self.headers = None  # type: ignore[assignment]
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        self._moved = self.loop.time()
        if self._in_head:
            data = self._without_upgrade(data)
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._parse_head(data, self._head_bytes - MAX_HEAD_BYTES)
                return
        super().data_received(data)

    def _parse_head(self, data: bytes, over: int) -> None:
        """Parse data with which a head exceeds MAX_HEAD_BYTES by `over`, and refuse it unless it ends before that."""
        within = len(data) - over
        self._head_bytes = MAX_HEAD_BYTES
        super().data_received(data[:within])
        if self.transport.is_closing():
            return
        if self._head_bytes != MAX_HEAD_BYTES:
            super().data_received(data[within:])
        elif self._in_head and (self.cycle is None or self.cycle.response_complete):
            self._refuse_head()
        else:
            self.transport.abort()

    def _refuse_head(self) -> None:
        body = ApiError(431, f"the head of the request is larger than {MAX_HEAD_BYTES} bytes").body()
        lines = (b"content-type: application/json", b"content-length: %d" % len(body), b"connection: close")
        self.transport.write(STATUS_LINE[431] + b"\r\n".join(lines) + HEAD_END + body)
        self.transport.close()

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.abort()
            raise ConnectionError("too many requests at once")  # ends the parsing
        self._in_head = False
        self._head_bytes = None
        self._discarded = 0
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        """Trailers follow the last chunk header; after others `on_body` is called."""
        self._head_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._head_bytes = None
        if self.cycle.response_complete:
            self._discarded += len(body)
            if self._discarded > MAX_DISCARDED_BYTES:
                self.transport.abort()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        super().on_message_complete()

    def _without_upgrade(self, data: bytes) -> bytes:
        """Data of a request's head, and what follows it, without an Upgrade header. Such an offer (Java's client and
        curl offer HTTP/2) may be ignored (RFC 9110, 7.8), but the parser would leave the body to the other protocol."""
        if not self._past and not self._held and data[:1] not in (b"\r", b"\n"):
            end = data.find(HEAD_END)
            if end >= 0 and not UPGRADE.search(data, 0, end):
                return data
        whole = self._past + self._held + data
        begin = 0 if self._past else len(whole) - len(whole.lstrip(b"\r\n"))  # after empty lines
        end = whole.find(HEAD_END, begin)
        head = whole if end < 0 else whole[:end]
        held = 0
        if end < 0:  # the rest of the name may still be to come
            last = whole[1 - len(NAME) :].lower()
            held = next((n for n in range(len(last), 0, -1) if NAME.startswith(last[-n:])), 0)
        told = (UPGRADE.sub(IGNORED, head) + whole[len(head) :])[len(self._past) : len(whole) - held]
        self._held = whole[len(whole) - held :]
        self._past = whole[begin : len(whole) - held][1 - len(HEAD_END) :] if end < 0 else b""
        return told

    def on_response_complete(self) -> None:
        self._moved = self.loop.time()
        self._on_leave = None
        if self._answering is not None:
            if isinstance(transport := self._answering.transport, AnswerTransport):
                transport.flush()
            self._forget_answering(self._answering)
        super().on_response_complete()

    def _forget_answering(self, cycle: RequestResponseCycle) -> None:
        """The current request is answered, or never will be. Breaks the cycle between it and its transport."""
        cycle.transport = self.transport
        self._answering = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._claim.look()

    def resume_writing(self) -> None:
        self._unread = 0
        self._claim.look()
        super().resume_writing()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        cycle.transport = AnswerTransport(cycle)
        extensions: dict[str, Any] = {LEAVING: self._when_left, UNREAD: self._claim}
        cycle.scope["extensions"] = extensions
        super()._start_asgi_task(cycle, app)

    def _when_left(self, tell: Callable[[], None]) -> None:
        """See LEAVING."""
        if self._answering is None:  # the client has disconnected already
            tell()
            return
        self._on_leave = tell
        self.flow.resume_reading()  # a disconnect is noticed only while reading

    def _look(self) -> None:
        idle = self._is_clients_turn() and self.loop.time() - self._moved >= self.timeout_keep_alive
        unread = self._bytes_unread() if idle or self.flow.write_paused else 0
        if unread and unread == self._unread:
            self._claim.drop(unread)  # at once: close() would wait until everything is read
            return
        self._unread = unread
        if idle:
            self.transport.close()
        self._timer = self.loop.call_later(self.timeout_keep_alive, self._look)

    def _bytes_unread(self) -> int:
        """Bytes that the client has not acknowledged, in the transport's buffer and in the kernel's. Only writing makes
        them more."""
        sock = self.transport.get_extra_info("socket")
        queued = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4)
        return self.transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)

    def _is_clients_turn(self) -> bool:
        """Whether the client is to send something: the next request, or more of one that is waited for."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or (cycle.more_body and not self.flow.read_paused)
