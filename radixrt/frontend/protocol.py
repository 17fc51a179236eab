"""HTTP/1.1 on a connection: uvicorn's protocol, which besides does not wait for clients for ever."""

from __future__ import annotations

import asyncio
import fcntl
import re
import sys
import termios
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from radixrt.frontend.errors import ApiError

LEAVING = "radixrt.leaving"
"""Among a scope's `extensions`: takes what is called if the client leaves before it is answered. To wait for that in
`receive` takes a task, which costs a short request a tenth of its time."""


NAME = b"\nupgrade:"
UPGRADE = re.compile(NAME, re.IGNORECASE)
IGNORED = b"\nignored:"
"""As long as NAME: what is a place in one is the same in the other."""
HEAD_END = b"\r\n\r\n"
MOST_HEAD_BYTES = 64 << 10
"""Of a request's head, or of the trailers behind a body in chunks: the parser itself would take any number, from
anybody, and what is one value or URL as often again as it comes in parts."""


class AnswerTransport:
    """A connection while one request is answered: the head of the answer leaves with the first part of its body, as
    ASGI has it. Each write is a system call, and wakes the client."""

    __slots__ = ("_cycle", "_head", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport: asyncio.Transport = cycle.transport
        self._head: bytes | None = None
        """Empty when it has left."""

    def write(self, data: bytes) -> None:
        if self._head:
            self._transport.writelines((self._head, data))
            self._head = b""
        elif self._head is None and self._cycle.response_started:  # else it is 100 Continue
            self._head = data
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Nothing follows: a head that has no body leaves too."""
        if self._head:
            self.write(b"")

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class PatientProtocol(HttpToolsProtocol):
    """Ends a connection on which nothing has moved for `timeout_keep_alive` seconds, or up to twice as many, while it
    is the client's turn: to send its first request, or the rest of one, or to read what was written. Each would hold
    a socket, and the last one its answer too, for as long as the client lives.

    When a client leaves, the request that is being answered is told, also if others came behind it.

    A head that is too long is refused, or, where others are to be answered before it, ends the connection, as trailers
    that are too long do. What comes in one read with the end of another request is not counted.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._answering: RequestResponseCycle | None = None
        self._on_leave: Callable[[], None] | None = None
        self._moved = self.loop.time()
        """When the client has sent something, or was answered."""
        self._in_head = True
        """A request's head is to come, or the rest of one: `_past` is the end of what the parser has of it, `_held`
        what it will be given with the rest."""
        self._past = self._held = b""
        self._head_bytes: int | None = 0
        """Of a head, or of what is behind the last chunk; None in a body."""
        self._unread = 0
        """Bytes that it was still to read at the last look; 0 if something may have been written since."""
        self._timer = self.loop.call_later(self.timeout_keep_alive, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._unset_keepalive_if_required()
        if (cycle := self._answering) is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if self._on_leave is not None:
                self._on_leave()
            self._forget_answering()
        super().connection_lost(exc)
        # They refer to this connection: with what was not read of a body all would wait for the cyclic collector, which
        # seldom comes.
        self.cycle = self.scope = self.headers = None  # type: ignore[assignment]
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        self._moved = self.loop.time()
        if self._in_head:
            data = self._without_upgrade(data)
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                self._parse_head(data)
                return
        super().data_received(data)

    def _parse_head(self, data: bytes) -> None:
        """Data that goes beyond the most that a head may have, unless that ends before: the parser knows."""
        parts, within = memoryview(data), len(data) - (self._head_bytes - MOST_HEAD_BYTES)
        self._head_bytes = MOST_HEAD_BYTES
        super().data_received(parts[:within])
        if self.transport.is_closing():
            return
        if self._head_bytes != MOST_HEAD_BYTES:
            super().data_received(parts[within:])
        elif self._in_head and (self.cycle is None or self.cycle.response_complete):
            self._refuse_head()
        else:
            self.transport.abort()

    def _refuse_head(self) -> None:
        body = ApiError(431, f"the head of the request is larger than {MOST_HEAD_BYTES} bytes").body()
        lines = (b"content-type: application/json", b"content-length: %d" % len(body), b"connection: close")
        self.transport.write(STATUS_LINE[431] + b"\r\n".join(lines) + HEAD_END + body)
        self.transport.close()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = None
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        """If it is the last one trailers follow, else the chunk."""
        self._head_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._head_bytes = None
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        super().on_message_complete()

    def _without_upgrade(self, data: bytes) -> bytes:
        """A part of a request's head, and what follows it. An offer to go on in another protocol (Java's client and
        curl make one, of HTTP/2) is not taken up (RFC 9110, 7.8): the parser would leave the body to that protocol."""
        if not self._past and not self._held and data[:1] not in (b"\r", b"\n"):
            end = data.find(HEAD_END)
            if end >= 0 and not UPGRADE.search(data, 0, end):
                return data
        whole = self._past + self._held + data
        begin = 0 if self._past else len(whole) - len(whole.lstrip(b"\r\n"))  # after empty lines
        end = whole.find(HEAD_END, begin)
        head = whole if end < 0 else whole[:end]
        held = 0
        if end < 0:  # perhaps the rest of the name is still to come
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
            self._answering.transport.flush()
            self._forget_answering()
        super().on_response_complete()

    def _forget_answering(self) -> None:
        """It is answered, or never will be; its transport refers to it, and it to the plain one from now on."""
        self._answering.transport = self.transport
        self._answering = None

    def resume_writing(self) -> None:
        self._unread = 0
        super().resume_writing()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        cycle.transport = AnswerTransport(cycle)
        cycle.scope["extensions"] = {LEAVING: self._when_left}
        super()._start_asgi_task(cycle, app)

    def _when_left(self, tell: Callable[[], None]) -> None:
        """See LEAVING."""
        if self._answering is None:  # it has left
            tell()
            return
        self._on_leave = tell
        self.flow.resume_reading()  # of a connection that is not read no end is seen

    def _look(self) -> None:
        idle = self._is_clients_turn() and self.loop.time() - self._moved >= self.timeout_keep_alive
        unread = self._bytes_unread() if idle or self.flow.write_paused else 0
        if unread and unread == self._unread:
            self.transport.abort()  # to close it would wait until all is read
            return
        self._unread = unread
        if idle:
            self.transport.close()
        self._timer = self.loop.call_later(self.timeout_keep_alive, self._look)

    def _bytes_unread(self) -> int:
        """What the client has not acknowledged, here and in the kernel. It grows by what is written alone."""
        sock = self.transport.get_extra_info("socket")
        queued = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4)
        return self.transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)

    def _is_clients_turn(self) -> bool:
        """To send something: the next request, or more of one, of which no more is there than is asked for."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or (cycle.more_body and not self.flow.read_paused)
