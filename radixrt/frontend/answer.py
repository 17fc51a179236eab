"""One HTTP request in flight.

    transport --Delta--> Choice (text, stop strings, calls) --> gathered, or bytes in a mailbox --> ASGI send

Answers arrive as callbacks on the event loop; the request's own coroutine wakes up, takes all there is, and sends it
in one piece. A client that leaves, or that does not read, is cancelled at the router.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from radixrt.frontend.choice import Choice
from radixrt.frontend.errors import ApiError
from radixrt.frontend.logprobs import Tokens
from radixrt.frontend.output import TEXT, Output
from radixrt.frontend.parsing import Content, Piece
from radixrt.frontend.protocol import LEAVING
from radixrt.frontend.reasoning import reasoning_tokens
from radixrt.frontend.replies import Reply, native_line
from radixrt.messages import (
    Cancel,
    ClientRequest,
    Delta,
    Error,
    Generate,
    Sampling,
    TokenLogprob,
    Usage,
)
from radixrt.router.tokens import TextService
from radixrt.transports import Answer, RouterTransport

MAX_BACKLOG = 4 << 20
"""Bytes, in two chunks or more, that wait for a client that does not read, before its request is cancelled."""
REQUEST_ID = "x-request-id"
"""Where OpenAI's clients look for it."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
OnAnswer = Callable[[Choice], None]
"""Told of each choice that has ended."""


class Disconnected(Exception):
    """The client has left."""


class Mailbox:
    """Where callbacks leave bytes for the one coroutine that sends them."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.finished = False
        self.held = False
        """What is there must not be sent yet."""
        self.settled: Callable[[], Awaitable[None]] | None = None
        """Waits until all front ends know of the answer: its end is not sent before."""
        self._out: list[bytes] = []
        self._backlog = 0
        self._sending = False
        """The part before is not sent yet; until then nobody can take what is there."""
        self._waiter: asyncio.Future[None] | None = None

    def put(self, chunk: bytes) -> None:
        """Leave something to be sent; too much of it while the client does not read, and it counts as gone."""
        self._backlog += len(chunk)
        if self._sending and self._out and self._backlog > MAX_BACKLOG:
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
            raise self._taken_failure()
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
        self._waiter = None

    def _taken_failure(self) -> Exception:
        """Once raised it refers to who waits here, and so to all of this: it must not be kept here as well."""
        failure, self.failure, self.finished = self.failure, None, True
        return failure  # type: ignore[return-value]

    async def complete(self) -> None:
        """Return when all is there. ApiError, Disconnected."""
        while not self.finished:
            await self.changed()
        if self.settled is not None:
            await self.settled()

    async def part(self) -> bytes | None:
        """All that there is to send, at least something; None after the last. ApiError, Disconnected."""
        self._sending = False
        while self.failure or self.held or not self._out:
            if self.finished and not self.failure:
                return None
            await self.changed()
        if self.finished and self.settled is not None:
            await self.settled()
        self._sending = True
        out, self._out, self._backlog = self._out, [], 0
        return out[0] if len(out) == 1 else b"".join(out)


class Exchange(Mailbox):
    """All choices of one HTTP request, which may be several requests of the router's (one a prompt)."""

    def __init__(
        self, transport: RouterTransport, service: TextService, reply: Reply, streams: bool, usage: bool
    ) -> None:
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
        self._streams = streams
        self._tells_usage = usage
        self.held = True  # until the router has taken the request: a stream that has opened cannot be refused
        if streams:
            reply.begin(usage)

    def submit(
        self, request: Generate, echo: str = "", output: Output = TEXT, on_answer: OnAnswer | None = None
    ) -> None:
        """Send one request; its choices follow those of the requests before. `echo` is text put before each."""
        first = len(self.choices)
        for index in range(first, first + request.n):
            choice = Choice(index, self._service, request.sampling, output)
            self.choices.append(choice)
            if self._streams and (opening := self.reply.opening(index)):
                self.put(opening)
            if self.reply.of_content and request.sampling.logprobs is not None:
                self._tell_of_content(choice, output, request.sampling)
            if request.prompt_logprobs:
                choice.echo = echo, memoryview(request.prompt.ids).cast("i")[0]
            elif echo:
                self._echo(choice, echo, None)
        self.prompts += 1
        self._open += request.n
        self._ids.append(self._transport.submit(request, lambda answer: self._take(answer, first, on_answer)))

    def cancel(self) -> None:
        for request_id in self._ids:
            self._transport.cancel(request_id)

    def fail(self, problem: Exception) -> None:
        """See Mailbox. Once a stream has begun, an error is its last event."""
        if isinstance(problem, ApiError):
            problem = self.own_error(problem)
            if self._streams and not self.held and self.failure is None and not self.finished:
                self.put(self.error_event(problem))
                self.finished = True
                self.cancel()
                self.wake()
                return
        super().fail(problem)

    def own_error(self, problem: ApiError) -> ApiError:
        """An error as this API has it."""
        return problem

    def error_event(self, problem: ApiError) -> bytes:
        """What a stream says of an error."""
        return b"data: " + problem.body() + b"\n\n"

    @property
    def usages(self) -> list[Usage]:
        return [choice.usage for choice in self.choices]

    @property
    def reasoning_tokens(self) -> int:
        """Of all choices."""
        tokenizer = self._service.tokenizer
        thinking = [choice for choice in self.choices if choice.message.has_thoughts]
        return sum(reasoning_tokens(tokenizer, choice.message.thoughts, choice.ids) for choice in thinking)

    # ------------------------------------------------------------ from the router

    def _take(self, answer: Answer, first: int, on_answer: OnAnswer | None) -> None:
        if isinstance(answer, Error):
            self.fail(ApiError.of(answer, self.names))
        elif isinstance(answer, Delta):
            self.held = False
            choice = self.choices[first + answer.index]
            if choice.echo is not None:  # the prompt and what is said of it come together
                text, token = choice.echo
                choice.echo = None
                self._echo(choice, text, [TokenLogprob(token, math.nan), *(answer.prompt_logprobs or [])])
            ignored = choice.stopping
            pieces, stops = choice.take(answer)
            if stops:
                self._transport.tell(Cancel(answer.id, answer.index, choice.tokens))
            last = answer.finish is not None
            logprobs = None if ignored else answer.logprobs
            if logprobs and choice.unsaid:
                logprobs = [one for one in logprobs if one.token not in choice.unsaid]
            if choice.said is not None:
                choice.said.add(logprobs or ())
                for number, piece in enumerate(pieces, 1):
                    self._add(choice, [piece], choice.said.of(piece), last and number == len(pieces))
                if last and not pieces:
                    self._add(choice, [], None, last)
            # A token may have no text yet: it shows that it is there.
            elif pieces or last or (answer.ids and not ignored and (logprobs or not choice.parsed)):
                self._add(choice, pieces, logprobs, last)
            if last:
                if on_answer is not None:
                    on_answer(choice)
                self._open -= 1
                if not self._open:
                    self._end()

    def _tell_of_content(self, choice: Choice, output: Output, sampling: Sampling) -> None:
        """Log-probabilities, of the tokens that say its content."""
        choice.logprobs, tokenizer = [], self._service.tokenizer
        if output.parses or sampling.stop:
            choice.said = Tokens(tokenizer)
        elif tokenizer is not None and sampling.skip_special_tokens:
            choice.unsaid = tokenizer.special_ids

    def _echo(self, choice: Choice, text: str, logprobs: list[TokenLogprob] | None) -> None:
        """The prompt, as if it had been said."""
        piece = Content(text)
        choice.message.add(piece)
        self._add(choice, [piece], logprobs, last=False)

    def _add(self, choice: Choice, pieces: list[Piece], logprobs: list[TokenLogprob] | None, last: bool) -> None:
        """What a choice has gained: into chunks, one a piece, or kept for the whole answer."""
        if not self._streams:
            if logprobs:
                choice.logprobs = (choice.logprobs or []) + logprobs
            return
        found = self.reply.logprobs(logprobs, choice.chars)
        for piece in pieces[:-1]:
            self.put(self.reply.chunk(choice.index, piece, found))
            found = None
        piece = pieces[-1] if pieces else None
        choice.chars += sum(len(piece.text) for piece in pieces if type(piece) is Content)
        if last:
            self.put(self.reply.last_chunk(choice.index, piece, found, choice.finish, choice.usage))
        else:
            self.put(self.reply.chunk(choice.index, piece, found))

    def _end(self) -> None:
        if self._streams:
            reasoning = self.reasoning_tokens if self._tells_usage else 0
            self.put(self.reply.end(self.usages, self.prompts, reasoning))
        self.finished = True
        self.wake()

    # ------------------------------------------------------------ to the client

    async def whole(self) -> bytes:
        """The body of the answer, when all choices have ended. ApiError, Disconnected."""
        await self.complete()
        choices = [
            self.reply.choice(c.index, c.message, self.reply.logprobs(c.logprobs, 0), c.finish, c.stop)
            for c in self.choices
        ]
        return self.reply.body(choices, self.usages, self.prompts, self.reasoning_tokens)


class NativeExchange(Mailbox):
    """One message of the native protocol, its answers as lines of JSON. A refusal is a line too, and the status."""

    def __init__(self, transport: RouterTransport, request: ClientRequest) -> None:
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
        if isinstance(exchange, Exchange):
            self._headers.append((REQUEST_ID.encode(), exchange.reply.id.encode()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        unwatch = watch(scope, receive, self._exchange)
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

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        unwatch = watch(scope, receive, self._exchange)
        try:
            body = await self._exchange.whole()
        except Disconnected:
            return
        except ApiError as error:
            await send_error(send, error)
            return
        finally:
            unwatch()
            self._exchange.cancel()
        await send_body(send, 200, body, {REQUEST_ID: self._exchange.reply.id})


def watch(scope: Scope, receive: Receive, exchange: Mailbox) -> Callable[[], object]:
    """Fail the exchange when the client leaves, until what is returned is called."""

    def fail() -> None:
        exchange.fail(Disconnected())

    if (leaving := scope.get("extensions", {}).get(LEAVING)) is not None:
        leaving(fail)
        return lambda: None  # it is told of this request alone

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        fail()

    return asyncio.get_running_loop().create_task(listen()).cancel


async def send_body(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    """A JSON response."""
    lines = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    lines += [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_error(send: Send, error: ApiError) -> None:
    await send_body(send, error.status, error.body(), error.headers())
