"""Workers that are told to leave, for upgrades and repairs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from radixrt.client import AsyncClient
from radixrt.frontend.http.auth import Handler, KeyedHandler, json_response
from radixrt.frontend.http.codec import parse
from radixrt.messages import DrainWorker

DRAIN_PATH = "/v1/drain_worker"


class DrainBody(msgspec.Struct, kw_only=True):
    """POST to DRAIN_PATH."""

    worker: str
    restart: bool = False


_drain = msgspec.json.Decoder(DrainBody)


class WorkerRoutes:
    """`ask`, `read` and `restrict` as for AdapterRoutes."""

    def __init__(
        self,
        ask: Callable[[str], AsyncClient],
        read: Callable[[Request], Awaitable[bytes]],
        restrict: Callable[[DrainWorker], None],
    ) -> None:
        self._ask = ask
        self._read = read
        self._restrict = restrict

    def routes(self, unchecked: Callable[[KeyedHandler], Handler]) -> list[Route]:
        """The routes; `unchecked` makes handlers of them that pass on any key."""
        return [Route(DRAIN_PATH, unchecked(self.drain), methods=["POST"])]

    async def drain(self, request: Request, key: str) -> Response:
        """Answered when the worker has left."""
        body = parse(_drain, await self._read(request))
        message = DrainWorker(id=0, worker=body.worker, restart=body.restart, api_key=key)
        self._restrict(message)
        return json_response(await self._ask(key).send_drain(message))
