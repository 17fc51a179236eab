"""The connection of a front end to its router."""

from __future__ import annotations

import asyncio

from radixrt.client import AsyncClient
from radixrt.client.transports import Here, HereTransport, RouterTransport, ZmqTransport
from radixrt.frontend.http.errors import ApiError

ROUTER_SECONDS = 5.0
"""Timeout of questions to the router about itself."""
POLL_SECONDS = 0.02
FRESH_SECONDS = 2.0


class RouterLink:
    """The connection to `here`, a router on the same event loop, or to the one at `address`."""

    transport: RouterTransport
    """Set by `open`."""

    def __init__(self, address: str, here: Here | None = None) -> None:
        self._address = address
        self._here = here
        self._max_model_len = 0, 0.0
        """The router's max_model_len, and until when it is not asked for again."""

    def open(self) -> None:
        """Open the connection, on the event loop that will use it."""
        self.transport = HereTransport(self._here) if self._here else ZmqTransport(self._address)

    async def wait(self) -> None:
        """Wait until the router can be reached, so that the first request is not refused if both start at the same
        time."""
        deadline = asyncio.get_running_loop().time() + ROUTER_SECONDS
        while not self.transport.connected and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(POLL_SECONDS)

    async def close(self) -> None:
        """Close the connection; requests in flight end with an error that says so."""
        await self.transport.close("the server is shutting down")

    def reachable(self) -> RouterTransport:
        """The transport. Raises ApiError (503) if the router cannot be reached."""
        if not self.transport.connected:
            raise ApiError(503, "the router cannot be reached", retry_after=1.0)
        return self.transport

    async def check_model(self, model: str | None, key: str) -> None:
        """Raise ServerError (404) if a request names a model that is not served."""
        if model:
            await self.ask(key).check_model(model)

    async def max_model_len(self, key: str) -> int:
        """The router's, as it was at most FRESH_SECONDS ago; 0 if no worker serves."""
        found, until = self._max_model_len
        if (now := asyncio.get_running_loop().time()) >= until:
            found = (await self.ask(key).health())["max_model_len"]
            self._max_model_len = found, now + FRESH_SECONDS if found else 0.0
        return found

    def ask(self, key: str) -> AsyncClient:
        """A client for questions to the router. Raises ApiError (503) as `reachable` does."""
        return AsyncClient(self.reachable(), key, timeout=ROUTER_SECONDS)
