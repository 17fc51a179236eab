"""Workers that are told to leave, for upgrades and repairs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from radixrt.client import AsyncClient
from radixrt.frontend.http.auth import Handler, KeyedHandler, json_response
from radixrt.frontend.http.codec import parse
from radixrt.messages import ChangeAdapter, DrainWorker

DRAIN_PATH = "/v1/drain_worker"


class DrainBody(msgspec.Struct, kw_only=True):
    """POST to DRAIN_PATH."""

    worker: str
    restart: bool = False


_drain = msgspec.json.Decoder(DrainBody)


@dataclass(frozen=True, slots=True)
class AdminRoutes:
    """What routes need whose caller may be the admin, which is no tenant."""

    ask: Callable[[str], AsyncClient]
    """Returns a client with an API key, which the router checks."""
    read: Callable[[Request], Awaitable[bytes]]
    """Reads the body of a request whose key is not checked yet."""
    restrict: Callable[[ChangeAdapter | DrainWorker], None]
    """Says who may have what a message asks for."""


class WorkerRoutes(AdminRoutes):
    """The route that drains a worker."""

    def routes(self, unchecked: Callable[[KeyedHandler], Handler]) -> list[Route]:
        """The routes; `unchecked` makes handlers of them that pass on any key."""
        return [Route(DRAIN_PATH, unchecked(self.drain), methods=["POST"])]

    async def drain(self, request: Request, key: str) -> Response:
        """Answered when the worker has left."""
        body = parse(_drain, await self.read(request))
        message = DrainWorker(id=0, worker=body.worker, restart=body.restart, api_key=key)
        self.restrict(message)
        return json_response(await self.ask(key).send_drain(message))
