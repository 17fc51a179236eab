"""The routes of the live page's data."""

from __future__ import annotations

import functools
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from radixrt.client import AsyncClient
from radixrt.frontend.generate.answers import StreamAnswer
from radixrt.frontend.http.auth import Handler, KeyedHandler, json_response
from radixrt.frontend.http.errors import ApiError
from radixrt.frontend.live.feed import Feed

LIVE_PATH = "/v1/live"
MAX_FEEDS = 256
"""The most keys with which somebody looks at the same time."""
CONTENT_TYPE = b"text/event-stream; charset=utf-8"


class LiveRoutes:
    """`ask` returns a client with an API key; it raises ApiError (503) if the router cannot be reached. `keyed`: keys
    are configured; otherwise all callers are one."""

    def __init__(self, ask: Callable[[str], AsyncClient], keyed: bool) -> None:
        self._ask = ask
        self._keyed = keyed
        self._feeds: dict[str, Feed] = {}
        self._closed = False

    def routes(self, for_admin: Callable[[KeyedHandler], Handler]) -> list[Route]:
        """The routes; `for_admin` makes handlers of them that take the keys of tenants and the admin's."""
        return [
            Route(LIVE_PATH, for_admin(self.stream), methods=["GET"]),
            Route(f"{LIVE_PATH}/requests/{{id}}", for_admin(self.request), methods=["GET"]),
            Route(f"{LIVE_PATH}/tree", for_admin(self.tree), methods=["GET"]),
            Route(f"{LIVE_PATH}/tree/{{id}}", for_admin(self.text), methods=["GET"]),
        ]

    def close(self) -> None:
        """End all streams, and begin no others."""
        self._closed = True
        for feed in self._feeds.values():
            feed.close()
        self._feeds.clear()

    async def stream(self, request: Request, key: str) -> StreamAnswer:
        if self._closed:
            raise ApiError(503, "the server finishes the requests in flight, and ends", retry_after=5.0)
        key = key if self._keyed else ""
        if (feed := self._feeds.get(key)) is None:
            for other in [other for other, one in self._feeds.items() if not one.is_watched]:
                del self._feeds[other]
            if len(self._feeds) >= MAX_FEEDS:
                raise ApiError(503, "too many look at this server", retry_after=10.0)
            feed = self._feeds[key] = Feed(functools.partial(self._ask, key))
        return StreamAnswer(await feed.watch(), CONTENT_TYPE)

    async def request(self, request: Request, key: str) -> Response:
        return json_response(await self._ask(key).live("request", request.path_params["id"]))

    async def tree(self, request: Request, key: str) -> Response:
        query = request.query_params
        most = query.get("most", "2000")
        if not (most.isascii() and most.isdigit() and 0 < int(most[:6]) <= 10_000):
            raise ApiError(400, "most: expected a number from 1 to 10000", "most")
        return json_response(await self._ask(key).live("tree", query.get("root", ""), int(most)))

    async def text(self, request: Request, key: str) -> Response:
        return json_response(await self._ask(key).live("text", request.path_params["id"]))
