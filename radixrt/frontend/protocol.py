"""HTTP/1.1 on a connection: uvicorn's protocol, which besides does not wait for clients for ever."""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle


class PatientProtocol(HttpToolsProtocol):
    """Ends a connection on which nothing has moved for `timeout_keep_alive` seconds, or up to twice as many, while it
    is the client's turn: to send its first request, or the rest of one, or to read what was written. Each would hold
    a socket, and the last one its answer too, for as long as the client lives.

    When a client leaves, the request that is being answered is told, also if others came behind it.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._answering: RequestResponseCycle | None = None
        self._moved = self.loop.time()
        """When the client has sent something, or was answered."""
        self._unread = 0
        """Bytes that it was still to read at the last look; 0 if something may have been written since."""
        self._timer = self.loop.call_later(self.timeout_keep_alive, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._unset_keepalive_if_required()
        if (cycle := self._answering) is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._moved = self.loop.time()
        super().data_received(data)

    def on_response_complete(self) -> None:
        self._moved = self.loop.time()
        super().on_response_complete()

    def resume_writing(self) -> None:
        self._unread = 0
        super().resume_writing()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

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
