"""ASGI responses that send the parts in an exchange's outbox, or its whole answer.

The request's own coroutine wakes up, takes everything there is, and sends it in one write. If the client disconnects or
does not read, the request is cancelled at the router.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from radixrt.frontend.generate.exchange import Exchange
from radixrt.frontend.http.errors import ApiError
from radixrt.frontend.http.outbox import Disconnected, Outbox
from radixrt.frontend.http.protocol import LEAVING
from radixrt.frontend.http.responses import send_body, send_error
from radixrt.frontend.http.unread import UNREAD


class StreamAnswer:
    """An ASGI response that streams an exchange's parts.

    It starts with the first part, so that a refused request gets an error status instead of a stream."""

    def __init__(self, exchange: Outbox, content_type: bytes, headers: Mapping[str, str] = {}) -> None:
        self._exchange = exchange
        self._headers = [
            (b"content-type", content_type),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        self._headers += [(name.encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        unwatch = watch(scope, receive, self._exchange)
        self._exchange.claim = scope.get("extensions", {}).get(UNREAD)
        started = False
        try:
            while (part := await self._exchange.part()) is not None:
                if not started:
                    await send(self._start())
                    started = True
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except Disconnected:
            return
        except ApiError as error:
            await send_error(send, error)
            return
        finally:
            unwatch()
            self._exchange.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _start(self) -> dict[str, Any]:
        refusal = self._exchange.refusal
        own = refusal.headers() if refusal else {}
        headers = self._headers + [(name.encode(), value.encode()) for name, value in own.items()]
        return {"type": "http.response.start", "status": refusal.status if refusal else 200, "headers": headers}


class WholeAnswer:
    """An ASGI response that sends an exchange's answer when it is complete."""

    def __init__(self, exchange: Exchange[Any]) -> None:
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        unwatch = watch(scope, receive, self._exchange)
        try:
            await self._exchange.complete()
            whole = self._exchange.whole
            body = await asyncio.to_thread(whole) if self._exchange.takes_long else whole()
        except Disconnected:
            return
        except ApiError as error:
            await send_error(send, error)
            return
        finally:
            unwatch()
            self._exchange.cancel()
        await send_body(send, 200, body, self._exchange.reply.headers)


def watch(scope: Scope, receive: Receive, exchange: Outbox) -> Callable[[], object]:
    """Fail the exchange if the client disconnects. Calling the returned function ends the watch."""

    def fail() -> None:
        exchange.fail(Disconnected())

    if (leaving := scope.get("extensions", {}).get(LEAVING)) is not None:
        leaving(fail)
        return lambda: None  # the callback is for this request only

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        fail()

    return asyncio.get_running_loop().create_task(listen()).cancel
