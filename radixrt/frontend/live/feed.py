"""Asks the router for its state once a second while anybody looks, and tells all who do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from radixrt.client import AsyncClient, ServerError
from radixrt.frontend.http.codec import encode
from radixrt.frontend.http.errors import ApiError
from radixrt.frontend.http.outbox import Outbox

PERIOD_SECONDS = 1.0
NOT_REACHED = b": the router does not answer\n\n"
"""A comment in the stream."""


def event(name: bytes, data: Any) -> bytes:
    """A server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (name, encode(data))


class Viewer(Outbox):
    """One who looks. States that come while it does not read are left out."""

    def __init__(self, leave: Callable[[Viewer], None]) -> None:
        super().__init__()
        self._leave = leave

    def show(self, state: bytes) -> None:
        if not self._out:
            self.put(state)

    def cancel(self) -> None:
        self._leave(self)

    def end(self) -> None:
        """End the stream."""
        self.finished = True
        self.wake()


class Feed:
    """The states that one key may see. `ask` returns a client with that key, or raises ApiError."""

    def __init__(self, ask: Callable[[], AsyncClient]) -> None:
        self._ask = ask
        self._viewers: set[Viewer] = set()
        self._last = b""
        self._task: asyncio.Task[None] | None = None

    async def watch(self) -> Viewer:
        """Begin to look. Raises ServerError or ApiError if the router refuses that, or cannot be reached."""
        history = await self._ask().live("history")
        viewer = Viewer(self._leave)
        viewer.put(event(b"history", history) + self._last)
        self._viewers.add(viewer)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._poll())
        return viewer

    @property
    def is_watched(self) -> bool:
        return bool(self._viewers)

    def close(self) -> None:
        """End all streams."""
        for viewer in list(self._viewers):
            viewer.end()
            self._leave(viewer)

    def _leave(self, viewer: Viewer) -> None:
        self._viewers.discard(viewer)
        if not self._viewers and self._task is not None:
            self._task.cancel()
            self._task, self._last = None, b""

    async def _poll(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + PERIOD_SECONDS
            try:
                self._last = event(b"state", await self._ask().live("state"))
                told = self._last
            except (ServerError, ApiError):
                told = NOT_REACHED
            for viewer in list(self._viewers):
                viewer.show(told)
            await asyncio.sleep(max(due - loop.time(), PERIOD_SECONDS / 4))
