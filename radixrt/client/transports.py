"""Transports of a client's requests and their replies: over ZMQ or in-process to a router, over HTTP to a front end.

The messages are the same, and any number of requests may be in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import httpx
import msgspec
from msgspec import UNSET, UnsetType

from radixrt import wire
from radixrt.messages import (
    Ask,
    CalledTool,
    Cancel,
    ClientReply,
    ClientRequest,
    Delta,
    Deltas,
    Done,
    Error,
    ErrorReason,
    Forgotten,
    Generate,
    Info,
    Scored,
    Tokens,
)
from radixrt.messages.surrogates import NO_TEXT, surrogate_field

log = logging.getLogger("radixrt.client.transports")

CONNECT_SECONDS = 5.0
ELSEWHERE = (
    "a client belongs to the event loop, and the process, that it was first used on: make another one here, or a plain "
    "Client, which serves any thread"
)
FAREWELL_SECONDS = 0.3
"""Before a connection is closed, the router has this long to confirm that it has read the last Cancel."""
NATIVE_PATH = "/v1/native"
"""The route of an HTTP front end that takes one ClientRequest as JSON, and replies with ClientReplies, one per line."""

Answer = Delta | Scored | Tokens | Info | Error | Done
OnAnswer = Callable[[Answer], None]


def _encoded(encode: Callable[[Any], bytes], request: Any) -> bytes:
    """Raises ServerError (400) that names a text which is none."""
    try:
        return encode(request)
    except UnicodeEncodeError:
        field = (surrogate_field(request) or "").removeprefix("prompt.")
        raise ServerError(400, f"{field}: {NO_TEXT}", field) from None


class ServerError(Exception):
    """The server has refused or failed a request, or cannot be reached. `code` is an HTTP status, `field` the invalid
    field of the request, if any; `retry_after` is in seconds (with 429 and 503), or None; `reason` that of the router's
    Error, if it has one."""

    def __init__(
        self,
        code: int,
        message: str,
        field: str = "",
        retry_after: float | None = None,
        reason: ErrorReason | UnsetType = UNSET,
    ) -> None:
        super().__init__(f"{message} ({code})")
        self.code = code
        self.message = message
        self.field = field
        self.retry_after = retry_after
        self.reason = reason

    def error(self) -> Error:
        """As a message, without the request's id."""
        return Error(None, self.code, self.message, self.field, self.retry_after, self.reason)

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickling: by default, exceptions are restored by `__init__(*args)`, but `args` is only the message."""
        return type(self).__new__, (type(self), *self.args), self.__dict__


class Transport(Protocol):
    """Sends requests, and passes each reply to its request's callback, in order, on the event loop."""

    ordered: bool
    """Whether requests arrive in the order in which they were submitted."""

    def check(self) -> None:
        """Raise RuntimeError on another event loop, or in another process, than it was first used on."""

    def submit(self, request: ClientRequest, on_answer: OnAnswer) -> int:
        """Send a request. Sets and returns its id. `on_answer` is called with each reply, up to the last one.

        Raises RuntimeError as `check` does."""

    def cancel(self, request_id: int) -> None:
        """Stop a request, if it is not finished. `on_answer` is not called any more."""

    async def close(self) -> None:
        """Disconnect. Requests in flight are cancelled at the server; their callbacks get an Error (503)."""


class Home:
    """Remembers the event loop and the process that an object is first used on."""

    __slots__ = ("_loop", "_process")

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = 0

    def check(self) -> None:
        """Raise RuntimeError if they differ from those of the first call."""
        loop, process = asyncio.get_running_loop(), os.getpid()
        if self._loop is None:
            self._loop, self._process = loop, process
        elif loop is not self._loop or process != self._process:
            raise RuntimeError(ELSEWHERE)


class _Pending:
    """A request that waits for replies. `open`: its choices that are not finished (1 for requests without choices)."""

    __slots__ = ("on_answer", "open")

    def __init__(self, request: ClientRequest, on_answer: OnAnswer) -> None:
        self.on_answer = on_answer
        self.open = request.n if isinstance(request, Generate) else 1

    def give(self, reply: ClientReply) -> None:
        """Pass on a reply that is for this request alone."""
        if isinstance(reply, Deltas):
            for delta in reply.items:
                self.give_delta(delta)
        elif not isinstance(reply, Forgotten):
            self.open = 0
            self.on_answer(reply)

    def give_delta(self, delta: Delta) -> None:
        self.open -= delta.finish is not None
        self.on_answer(delta)

    def fail(self, request_id: int, message: str) -> None:
        """Pass on an Error (503), unless the last reply has come."""
        if self.open > 0:
            self.give(Error(request_id, 503, message, retry_after=1.0))


class RouterTransport(ABC):
    """Base of transports to a router, over a connection that all requests share. Subclasses implement `_post`."""

    ordered = True

    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}
        self._ids = itertools.count(1)
        self.on_forgotten: Callable[[bytes], None] = lambda tenant: None
        """Called with the digest of a tenant (`tenant_digest`) of which everything was deleted."""
        self._unconfirmed = False
        """Whether a Cancel was sent, which may not have arrived yet."""

    @property
    def connected(self) -> bool:
        """Whether the router is connected now."""
        return True

    def check(self) -> None:  # noqa: B027
        """See Transport."""

    @abstractmethod
    def _post(self, message: ClientRequest) -> bool:
        """Send a message. Returns False if the queue is full, as the router does not read."""

    def _disconnect(self) -> None:  # noqa: B027
        """Close the connection."""

    def submit(self, request: ClientRequest, on_answer: OnAnswer) -> int:
        """See Transport. Raises ServerError (503) if the router does not read."""
        request.id = next(self._ids)
        if not self._post(request):
            raise ServerError(503, "the router does not read its messages", retry_after=1.0)
        self._pending[request.id] = _Pending(request, on_answer)
        return request.id

    def cancel(self, request_id: int) -> None:
        if self._pending.pop(request_id, None) is not None:
            self.tell(Cancel(request_id))

    def tell(self, message: Cancel | CalledTool) -> None:
        """Send a message about a request that is in flight."""
        self._unconfirmed = True
        self._post(message)

    async def close(self, reason: str = "the connection was closed") -> None:
        for request_id in self._pending:
            self.tell(Cancel(request_id))
        self._fail_all(reason)
        try:
            if self._unconfirmed and self.connected:
                await self._confirm()
        finally:
            self._disconnect()
            self._fail_all(reason)

    async def _confirm(self) -> None:
        """Wait until the router has read all Cancels: messages arrive in order, so it has once it replies to a later
        request."""
        answered = asyncio.Event()
        with contextlib.suppress(TimeoutError, ServerError):
            self.submit(Ask(id=0, what="health"), lambda _: answered.set())
            await asyncio.wait_for(answered.wait(), FAREWELL_SECONDS)

    def _take(self, reply: ClientReply) -> None:
        """Pass a reply to the request that it is for."""
        if isinstance(reply, Forgotten):
            self.on_forgotten(reply.tenant)
            return
        if not isinstance(reply, Deltas):
            if reply.id is not None and (pending := self._pending.pop(reply.id, None)):
                pending.give(reply)
            return
        for delta in reply.items:
            if pending := self._pending.get(delta.id):
                if delta.finish is not None and pending.open == 1:
                    del self._pending[delta.id]
                try:
                    pending.give_delta(delta)
                except Exception:  # a callback failed; the other Deltas of this message must not be lost
                    log.exception("an answer could not be taken in")
                    self.cancel(delta.id)
                    with contextlib.suppress(Exception):
                        pending.on_answer(Error(delta.id, 500, "the answer could not be read; the log says why"))

    def _fail_all(self, message: str) -> None:
        pending, self._pending = self._pending, {}
        for request_id, one in pending.items():
            one.fail(request_id, message)


class ZmqTransport(RouterTransport):
    """A transport to a router over ZMQ. To be constructed on the event loop that uses it.

    If the router is not connected, a request fails after `timeout` seconds with an Error (503). The time until a
    connected router replies is not limited."""

    _reply = wire.Decoder(ClientReply)

    def __init__(self, address: str, timeout: float = CONNECT_SECONDS) -> None:
        super().__init__()
        self._home = Home()
        self._home.check()
        self._timeout = timeout
        self._socket = wire.DealerSocket(address, self._receive, on_lost=self._lost)

    @property
    def connected(self) -> bool:
        return self._socket.connected

    def check(self) -> None:
        self._home.check()

    def submit(self, request: ClientRequest, on_answer: OnAnswer) -> int:
        self.check()
        request_id = super().submit(request, on_answer)
        if not self.connected:
            asyncio.get_running_loop().call_later(self._timeout, self._give_up, request_id)
        return request_id

    def _give_up(self, request_id: int) -> None:
        """Fail a request if the router is still not connected. (Had it been connected since, and lost, the request
        would have failed already.)"""
        if not self.connected and (pending := self._pending.get(request_id)):
            self.cancel(request_id)
            pending.fail(request_id, "the router cannot be reached")

    def _post(self, message: ClientRequest) -> bool:
        return self._socket.send(_encoded(wire.encode, message))

    def _disconnect(self) -> None:
        self._socket.close()

    def _receive(self, payload: bytes) -> None:
        self._take(self._reply.decode(payload))

    def _lost(self) -> None:
        self._fail_all("the connection to the router was lost")


class Here(Protocol):
    """A router that runs on this event loop (`router.server.loop.RouterServer`)."""

    def attach(self, deliver: Callable[[ClientReply], None]) -> bytes: ...
    def take(self, client: bytes, message: ClientRequest) -> None: ...


class HereTransport(RouterTransport):
    """A transport to a router on the same event loop: messages are passed as objects."""

    def __init__(self, router: Here) -> None:
        super().__init__()
        self._router = router
        self._identity = router.attach(self._take)

    def _post(self, message: ClientRequest) -> bool:
        self._router.take(self._identity, message)
        return True


class HttpTransport:
    """A transport to an HTTP front end. Each request is one POST to NATIVE_PATH; cancelling it closes its connection.
    `url` may end in `/v1`, as OpenAI's clients require it."""

    ordered = False
    _reply = msgspec.json.Decoder(ClientReply)
    _encode = msgspec.json.Encoder().encode

    def __init__(self, url: str, api_key: str = "") -> None:
        headers = {b"authorization": f"Bearer {api_key}".encode()} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        base = httpx.URL(url)
        base = base.copy_with(path=base.path.rstrip("/").removesuffix("/v1"))
        self._client = httpx.AsyncClient(base_url=base, headers=headers, limits=limits, timeout=timeout)
        self._open: dict[int, tuple[asyncio.Task[None], _Pending]] = {}
        self._ids = itertools.count(1)
        self._home = Home()

    def check(self) -> None:
        """See Transport."""
        self._home.check()

    def submit(self, request: ClientRequest, on_answer: OnAnswer) -> int:
        """See Transport."""
        self.check()
        request.id = next(self._ids)
        pending = _Pending(request, on_answer)
        work = self._post(request.id, _encoded(self._encode, request), pending)
        self._open[request.id] = asyncio.get_running_loop().create_task(work), pending
        return request.id

    def cancel(self, request_id: int) -> None:
        # One that has its last reply reads the end of the response by itself. If it was cancelled while it does, httpx
        # would neither use nor close its connection any more.
        if (entry := self._open.get(request_id)) and entry[1].open > 0:
            del self._open[request_id]
            entry[0].cancel()

    async def close(self) -> None:
        entries, self._open = self._open, {}
        for task, _ in entries.values():
            task.cancel()
        await asyncio.gather(*(task for task, _ in entries.values()), return_exceptions=True)
        for request_id, (_, pending) in entries.items():
            pending.fail(request_id, "the connection was closed")
        await self._client.aclose()

    async def _post(self, request_id: int, body: bytes, pending: _Pending) -> None:
        problem = "the connection ended before the answer did"
        headers = {"content-type": "application/json"}
        try:
            async with self._client.stream("POST", NATIVE_PATH, content=body, headers=headers) as response:
                if not _is_native(response):
                    await response.aread()
                    pending.give(_refusal(request_id, response))
                    return
                async for line in response.aiter_lines():
                    if line:
                        pending.give(self._reply.decode(line))
        except Exception as error:  # of any kind: the caller must not wait for ever
            problem = f"{type(error).__name__}: {error}"
        finally:
            self._open.pop(request_id, None)
        pending.fail(request_id, problem)


def _is_native(response: httpx.Response) -> bool:
    return response.headers.get("content-type", "").startswith("application/x-ndjson")


def _refusal(request_id: int, response: httpx.Response) -> Error:
    """The Error for a response that is not in the native protocol: a front end's error body, or any response of another
    server."""
    try:
        error = msgspec.json.decode(response.content)["error"]
        message, field = error["message"], error.get("param") or ""
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError):
        return Error(request_id, 503, f"no radixrt answers there (HTTP status {response.status_code})")
    seconds = response.headers.get("retry-after", "")
    return Error(request_id, response.status_code, message, field, float(seconds) if seconds.isdigit() else None)
