"""One HTTP request in flight.

    transport --Delta--> Choice (text, stop strings) --> gathered, or bytes in a mailbox --> ASGI send

Answers arrive as callbacks on the event loop; the request's own coroutine wakes up, takes all there is, and sends it
in one piece. A client that leaves, or that does not read, is cancelled at the router.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from radixrt.frontend.errors import ApiError
from radixrt.frontend.replies import DONE, Reply, native_line
from radixrt.messages import (
    Cancel,
    ClientRequest,
    Delta,
    Error,
    Generate,
    TokenLogprob,
    Usage,
)
from radixrt.router.tokens import TextService, TextStream
from radixrt.transports import Answer, ZmqTransport

MAX_BACKLOG = 4 << 20
"""Bytes that wait for a client that does not read, before its request is cancelled."""

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Disconnected(Exception):
    """The client has left."""


class Mailbox:
    """Where callbacks leave bytes for the one coroutine that sends them."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.finished = False
        self.held = False
        """What is there must not be sent yet."""
        self._out: list[bytes] = []
        self._backlog = 0
        self._waiter: asyncio.Future[None] | None = None

    def put(self, chunk: bytes) -> None:
        """Leave something to be sent; too much of it, and the client counts as gone."""
        self._backlog += len(chunk)
        if self._backlog > MAX_BACKLOG:
            self.fail(Disconnected())
            return
        self._out.append(chunk)
        self.wake()

    def wake(self) -> None:
        """Something has changed."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, problem: Exception) -> None:
        """No more will come. The work is cancelled at once: who waits here may be stuck in a send."""
        if self.failure is None and not self.finished:
            self.failure = problem
            self.cancel()
            self.wake()

    def cancel(self) -> None:
        """Stop what is not finished at the router."""

    async def changed(self) -> None:
        """Return after the next `wake`; raise `failure` if there is one, at once or then."""
        if self.failure:
            raise self.failure
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
        self._waiter = None

    async def part(self) -> bytes | None:
        """All that there is to send, at least something; None after the last. ApiError, Disconnected."""
        while self.held or not self._out:
            if self.finished:
                return None
            await self.changed()
        out, self._out, self._backlog = self._out, [], 0
        return out[0] if len(out) == 1 else b"".join(out)


class Choice:
    """One choice of an answer: its text so far, and how it ended."""

    __slots__ = ("chars", "finish", "index", "logprobs", "stop", "stopping", "stream", "text", "tokens", "usage")

    def __init__(self, index: int, stream: TextStream) -> None:
        self.index = index
        self.stream = stream
        self.text: list[str] = []
        self.chars = 0
        self.tokens = 0
        """Taken before a stop string was complete: what the worker adds until it hears of that is nobody's."""
        self.logprobs: list[TokenLogprob] | None = None
        self.finish: Any = None
        self.stop: str | int | None = None
        self.stopping = False
        """A stop string was found; the last Delta, with the usage, is on its way."""
        self.usage = Usage()

    def take(self, delta: Delta) -> tuple[str, bool]:
        """(text gained, whether the choice must be ended at the router)."""
        text = ""
        if not self.stopping:
            text = self.stream.take(delta)
            self.tokens += len(delta.ids) // 4
        found = self.stream.stop
        if delta.finish is not None:
            self.finish, self.stop = delta.finish, delta.stop
            self.usage = delta.usage or Usage()
        if found is not None:
            self.stop = found
            if delta.finish is not None:
                self.finish = "stop"
                self.usage = msgspec.structs.replace(self.usage, completion_tokens=self.tokens)
            elif not self.stopping:
                self.stopping = True
                return text, True
        return text, False


class Exchange(Mailbox):
    """All choices of one HTTP request, which may be several requests of the router's (one a prompt)."""

    def __init__(self, transport: ZmqTransport, service: TextService, reply: Reply, streams: bool, usage: bool) -> None:
        super().__init__()
        self.reply = reply
        self.names: dict[str, str] = {}
        """How the caller calls the router's fields."""
        self.choices: list[Choice] = []
        self.prompts = 0
        self._transport = transport
        self._service = service
        self._ids: list[int] = []
        self._open = 0
        self.refusal: ApiError | None = None
        """A stream of OpenAI's is refused by an error in its place."""
        self._include_usage = usage
        self._streams = streams
        self.held = True  # until the router has taken the request: a stream that has opened cannot be refused
        self._head, self._tail = reply.chunk_ends(usage) if streams else (b"", b"")

    def submit(self, request: Generate, echo: str = "") -> None:
        """Send one request; its choices follow those of the requests before. `echo` is text put before each."""
        first = len(self.choices)
        for index in range(first, first + request.n):
            choice = Choice(index, TextStream(self._service, request.sampling))
            self.choices.append(choice)
            if self._streams and (opening := self.reply.first_chunk(index)):
                self.put(self._head + opening + self._tail)
            if echo:
                self._add(choice, echo, None, last=False)
        self.prompts += 1
        self._open += request.n
        self._ids.append(self._transport.submit(request, lambda answer: self._take(answer, first)))

    def cancel(self) -> None:
        for request_id in self._ids:
            self._transport.cancel(request_id)

    @property
    def usages(self) -> list[Usage]:
        return [choice.usage for choice in self.choices]

    # ------------------------------------------------------------ from the router

    def _take(self, answer: Answer, first: int) -> None:
        if isinstance(answer, Error):
            self.fail(ApiError.of(answer, self.names))
        elif isinstance(answer, Delta):
            self.held = False
            choice = self.choices[first + answer.index]
            text, stops = choice.take(answer)
            if stops:
                self._transport.tell(Cancel(answer.id, answer.index))
            last = answer.finish is not None
            ignored = choice.stopping and not stops
            if text or last or (answer.ids and not ignored):  # a token may have no text yet: it shows that it is there
                self._add(choice, text, None if ignored else answer.logprobs, last)
            if last:
                self._open -= 1
                if not self._open:
                    self._end()

    def _add(self, choice: Choice, text: str, logprobs: list[TokenLogprob] | None, last: bool) -> None:
        """Text gained by a choice: into a chunk, or kept for the whole answer."""
        if not self._streams:
            choice.text.append(text)
            if logprobs:
                choice.logprobs = (choice.logprobs or []) + logprobs
            return
        found = self.reply.logprobs(logprobs, choice.chars)
        choice.chars += len(text)
        chunk = self.reply.choice_chunk(choice.index, text, found, choice.finish if last else None)
        tail = self.reply.last_end(self._tail, choice.usage) if last else self._tail
        self.put(self._head + chunk + tail)

    def _end(self) -> None:
        if self._streams:
            if self._include_usage:
                self.put(self.reply.usage_chunk(self.usages, self.prompts))
            self.put(DONE)
        self.finished = True
        self.wake()

    # ------------------------------------------------------------ to the client

    async def whole(self) -> bytes:
        """The body of the answer, when all choices have ended. ApiError, Disconnected."""
        while not self.finished:
            await self.changed()
        choices = [
            self.reply.choice(c.index, "".join(c.text), self.reply.logprobs(c.logprobs, 0), c.finish, c.stop)
            for c in self.choices
        ]
        return self.reply.body(choices, self.usages, self.prompts)


class NativeExchange(Mailbox):
    """One message of the native protocol, its answers as lines of JSON. A refusal is a line too, and the status."""

    def __init__(self, transport: ZmqTransport, request: ClientRequest) -> None:
        super().__init__()
        self._asked_id = request.id
        self.refusal: ApiError | None = None
        self._open = request.n if isinstance(request, Generate) else 1
        self._transport = transport
        self._id = transport.submit(request, self._take)

    def cancel(self) -> None:
        self._transport.cancel(self._id)

    def _take(self, answer: Answer) -> None:
        answer.id = self._asked_id
        if isinstance(answer, Error):
            self.refusal = ApiError.of(answer)
        self.put(native_line(answer))
        self._open -= not isinstance(answer, Delta) or answer.finish is not None
        self.finished = self._open <= 0 or isinstance(answer, Error)
        self.wake()


class StreamAnswer:
    """An ASGI response that sends an exchange's parts as they come.

    It begins with the first part, so that a request that is refused gets its status and not a stream."""

    def __init__(self, exchange: Exchange | NativeExchange, content_type: bytes) -> None:
        self._exchange = exchange
        self._headers = [
            (b"content-type", content_type),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]

    async def __call__(self, scope: object, receive: Receive, send: Send) -> None:
        watcher = watch(receive, self._exchange)
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
            if not started:
                await send_error(send, error)
                return
            await send({"type": "http.response.body", "body": b"data: " + error.body() + b"\n\n", "more_body": True})
        finally:
            watcher.cancel()
            self._exchange.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _start(self) -> dict[str, Any]:
        refusal = self._exchange.refusal
        own = refusal.headers() if refusal else {}
        headers = self._headers + [(name.encode(), value.encode()) for name, value in own.items()]
        return {"type": "http.response.start", "status": refusal.status if refusal else 200, "headers": headers}


class WholeAnswer:
    """An ASGI response that sends an exchange's answer when it is complete."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def __call__(self, scope: object, receive: Receive, send: Send) -> None:
        watcher = watch(receive, self._exchange)
        try:
            body = await self._exchange.whole()
        except Disconnected:
            return
        except ApiError as error:
            await send_error(send, error)
            return
        finally:
            watcher.cancel()
            self._exchange.cancel()
        await send_body(send, 200, body, {})


def watch(receive: Receive, exchange: Mailbox) -> asyncio.Task[None]:
    """A task that fails the exchange when the client leaves."""

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        exchange.fail(Disconnected())

    return asyncio.get_running_loop().create_task(listen())


async def send_body(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    """A JSON response."""
    lines = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    lines += [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_error(send: Send, error: ApiError) -> None:
    await send_body(send, error.status, error.body(), error.headers())
