"""How requests travel and answers come back: over ZMQ to a router, over HTTP to a front end.

Both carry the same messages, any number of them in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import copyreg
import itertools
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import httpx
import msgspec

from radixrt import wire
from radixrt.messages import (
    Ask,
    Cancel,
    ClientReply,
    ClientRequest,
    Delta,
    Deltas,
    Done,
    Error,
    Generate,
    Info,
    Scored,
    Tokens,
)

log = logging.getLogger("radixrt.transports")

CONNECT_SECONDS = 5.0
ELSEWHERE = (
    "a client belongs to the event loop, and the process, that it was first used on: make another one here, or a plain "
    "Client, which serves any thread"
)
FAREWELL_SECONDS = 0.3
"""A router is given this long to confirm that it has read the last cancels, before its connection is closed."""
NATIVE_PATH = "/v1/native"
"""Where an HTTP front end takes one ClientRequest as JSON and answers with ClientReplies, one a line."""

Answer = Delta | Scored | Tokens | Info | Error | Done
OnAnswer = Callable[[Answer], None]


class ServerError(Exception):
    """The server refused or failed a request. `code` is an HTTP status, `field` names what is wrong in the request,
    `retry_after` is in seconds (with 429 and 503) or None."""

    def __init__(self, code: int, message: str, field: str = "", retry_after: float | None = None) -> None:
        super().__init__(f"{message} ({code})")
        self.code = code
        self.message = message
        self.field = field
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        """As it is, for another process: `__init__` takes more than the message."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__


class Transport(Protocol):
    """Carries requests and their answers. Answers come on the event loop, by request, in order."""

    ordered: bool
    """Requests arrive in the order in which they were submitted."""

    def check(self) -> None:
        """RuntimeError on another event loop, or in another process, than it was first used on."""

    def submit(self, request: ClientRequest, on_answer: OnAnswer) -> int:
        """Send a request, which gets an id of its own; `on_answer` is called until the last answer has come.

        RuntimeError as of `check`."""

    def cancel(self, request_id: int) -> None:
        """Stop a request, if it is not finished; no further answer comes."""

    async def close(self) -> None:
        """Disconnect. Requests in flight are cancelled at the server and answered with an Error (503) here."""


class Home:
    """The event loop and the process that something was first used on."""

    __slots__ = ("_loop", "_process")

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = 0

    def check(self) -> None:
        """RuntimeError on any other."""
        loop, process = asyncio.get_running_loop(), os.getpid()
        if self._loop is None:
            self._loop, self._process = loop, process
        elif loop is not self._loop or process != self._process:
            raise RuntimeError(ELSEWHERE)


class _Pending:
    """A request whose answers still come, `open` of them to be the last of a choice."""

    __slots__ = ("on_answer", "open")

    def __init__(self, request: ClientRequest, on_answer: OnAnswer) -> None:
        self.on_answer = on_answer
        self.open = request.n if isinstance(request, Generate) else 1

    def give(self, reply: ClientReply) -> None:
        """Hand on a reply that is about this request alone."""
        if isinstance(reply, Deltas):
            for delta in reply.items:
                self.give_delta(delta)
        else:
            self.open = 0
            self.on_answer(reply)

    def give_delta(self, delta: Delta) -> None:
        self.open -= delta.finish is not None
        self.on_answer(delta)

    def fail(self, request_id: int, message: str) -> None:
        """Answer with a 503, unless the last answer has come."""
        if self.open > 0:
            self.give(Error(request_id, 503, message, retry_after=1.0))


class RouterTransport(ABC):
    """Any number of requests in flight at a router, whose replies come all together. `_post` sends it a message."""

    ordered = True

    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}
        self._ids = itertools.count(1)
        self._unconfirmed = False
        """A Cancel was sent: it may still be under way."""

    @property
    def connected(self) -> bool:
        """Whether the router is there now."""
        return True

    def check(self) -> None:  # noqa: B027
        """See Transport."""

    @abstractmethod
    def _post(self, message: ClientRequest) -> bool:
        """False when the router does not read."""

    def _disconnect(self) -> None:  # noqa: B027
        """Nothing more will be sent."""

    def submit(self, request: ClientRequest, on_answer: OnAnswer) -> int:
        """See Transport. ServerError (503) when the router does not read."""
        request.id = next(self._ids)
        if not self._post(request):
            raise ServerError(503, "the router does not read its messages", retry_after=1.0)
        self._pending[request.id] = _Pending(request, on_answer)
        return request.id

    def cancel(self, request_id: int) -> None:
        if self._pending.pop(request_id, None) is not None:
            self.tell(Cancel(request_id))

    def tell(self, message: Cancel) -> None:
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
        """Wait for any answer: messages arrive in order, so the cancels before the question have arrived too."""
        answered = asyncio.Event()
        with contextlib.suppress(TimeoutError, ServerError):
            self.submit(Ask(id=0, what="health"), lambda _: answered.set())
            await asyncio.wait_for(answered.wait(), FAREWELL_SECONDS)

    def _take(self, reply: ClientReply) -> None:
        """Hand a reply on to who waits for it."""
        if not isinstance(reply, Deltas):
            if pending := self._pending.pop(reply.id, None):
                pending.give(reply)
            return
        for delta in reply.items:
            if pending := self._pending.get(delta.id):
                if delta.finish is not None and pending.open == 1:
                    del self._pending[delta.id]
                try:
                    pending.give_delta(delta)
                except Exception:  # of one answer: the others of this message are not to be lost
                    log.exception("an answer could not be taken in")
                    self.cancel(delta.id)
                    with contextlib.suppress(Exception):
                        pending.on_answer(Error(delta.id, 500, "the answer could not be read; the log says why"))

    def _fail_all(self, message: str) -> None:
        pending, self._pending = self._pending, {}
        for request_id, one in pending.items():
            one.fail(request_id, message)


class ZmqTransport(RouterTransport):
    """To a router by one socket. Make it on the event loop that is to use it.

    A request waits `timeout` seconds for a router that is not there, then it is answered with an Error (503); for the
    answers of one that is there it waits as long as they take."""

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
        """Fail a request that no router has come for: had one come and gone, it would have failed by then."""
        if not self.connected and (pending := self._pending.get(request_id)):
            self.cancel(request_id)
            pending.fail(request_id, "the router cannot be reached")

    def _post(self, message: ClientRequest) -> bool:
        return self._socket.send(wire.encode(message))

    def _disconnect(self) -> None:
        self._socket.close()

    def _receive(self, payload: bytes) -> None:
        self._take(self._reply.decode(payload))

    def _lost(self) -> None:
        self._fail_all("the connection to the router was lost")


class Here(Protocol):
    """A router on this event loop (`router.loop.RouterServer`)."""

    def attach(self, deliver: Callable[[ClientReply], None]) -> bytes: ...
    def take(self, client: bytes, message: ClientRequest) -> None: ...


class HereTransport(RouterTransport):
    """To a router on the same event loop: messages are handed over as they are."""

    def __init__(self, router: Here) -> None:
        super().__init__()
        self._router = router
        self._identity = router.attach(self._take)

    def _post(self, message: ClientRequest) -> bool:
        self._router.take(self._identity, message)
        return True


class HttpTransport:
    """A request of the native protocol is one POST; cancelling it closes the connection. `url` may end in `/v1`, as
    OpenAI's clients want it."""

    ordered = False
    _reply = msgspec.json.Decoder(ClientReply)
    _encode = msgspec.json.Encoder().encode

    def __init__(self, url: str, api_key: str = "") -> None:
        headers = {"authorization": f"Bearer {api_key}".encode()} if api_key else {}
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
        work = self._post(request.id, self._encode(request), pending)
        self._open[request.id] = asyncio.get_running_loop().create_task(work), pending
        return request.id

    def cancel(self, request_id: int) -> None:
        if entry := self._open.pop(request_id, None):
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
        except Exception as error:  # whatever it is, who waits for an answer must hear of it
            problem = f"{type(error).__name__}: {error}"
        finally:
            self._open.pop(request_id, None)
        pending.fail(request_id, problem)


def _is_native(response: httpx.Response) -> bool:
    return response.headers.get("content-type", "").startswith("application/x-ndjson")


def _refusal(request_id: int, response: httpx.Response) -> Error:
    """What a server says that does not answer in the native protocol: a front end's error, or somebody else's page."""
    try:
        error = msgspec.json.decode(response.content)["error"]
        message, field = error["message"], error.get("param") or ""
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError):
        return Error(request_id, 503, f"no radixrt answers there (HTTP status {response.status_code})")
    seconds = response.headers.get("retry-after", "")
    return Error(request_id, response.status_code, message, field, float(seconds) if seconds.isdigit() else None)
