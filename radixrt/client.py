"""One client over ZMQ, HTTP and in-process, async (`AsyncClient`) and plain (`Client`).

    AsyncClient.connect("tcp://127.0.0.1:5555")     a router's ZMQ socket (or ipc://, inproc://)
    AsyncClient.connect("http://127.0.0.1:8000")    an HTTP front end
    AsyncClient.connect("local:FOLDER")             a router and a worker in threads of this process

All three carry the same messages; what differs is the `Transport`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import itertools
import threading
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol, Self, TypeVar

import httpx
import msgspec

from radixrt import wire
from radixrt.messages import (
    Ask,
    Cancel,
    ChatPrompt,
    ClientReply,
    ClientRequest,
    Delta,
    Deltas,
    Detokenize,
    Error,
    FinishReason,
    Generate,
    Info,
    Origin,
    PartsPrompt,
    Prompt,
    Sampling,
    Score,
    Scored,
    TextPrompt,
    Tokenize,
    TokenLogprob,
    TokenPrompt,
    Tokens,
    Usage,
)

CONNECT_SECONDS = 5.0
CANCEL_SECONDS = 2.0
"""An interrupted wait (Ctrl-C) is given this long to cancel at the server what it waited for."""
FAREWELL_SECONDS = 0.3
"""A router is given this long to confirm that it has read the last cancels, before its connection is closed."""
NATIVE_PATH = "/v1/native"
"""Where an HTTP front end takes one ClientRequest as JSON and answers with ClientReplies, one a line."""

Answer = Delta | Scored | Tokens | Info | Error
OnAnswer = Callable[[Answer], None]
PromptLike = str | Sequence[int] | Sequence[dict[str, Any]] | Prompt
T = TypeVar("T")


class ServerError(Exception):
    """The server refused or failed a request. `code` is an HTTP status, `field` names what is wrong in the request,
    `retry_after` is in seconds (with 429 and 503) or None."""

    def __init__(self, code: int, message: str, field: str = "", retry_after: float | None = None) -> None:
        super().__init__(f"{message} ({code})")
        self.code = code
        self.message = message
        self.field = field
        self.retry_after = retry_after


class Completion(msgspec.Struct):
    """One finished choice. `ids` are the generated token ids, int32 little-endian; `logprobs` go with them."""

    text: str = ""
    ids: bytes = b""
    finish: FinishReason = "stop"
    stop: str | int | None = None
    usage: Usage = Usage()
    logprobs: list[TokenLogprob] | None = None

    @property
    def token_ids(self) -> list[int]:
        return token_list(self.ids)


def token_bytes(ids: Sequence[int]) -> bytes:
    """Token ids as they travel: int32, little-endian. OverflowError for what is no int32."""
    return array("i", ids).tobytes()


def token_list(ids: bytes) -> list[int]:
    """The inverse of `token_bytes`."""
    return array("i", ids).tolist()


def as_prompt(prompt: PromptLike) -> Prompt:
    """Text, token ids or chat messages as the message that says which. TypeError for anything else."""
    match prompt:
        case str():
            return TextPrompt(prompt)
        case TextPrompt() | TokenPrompt() | ChatPrompt() | PartsPrompt():
            return prompt
        case [dict(), *_]:
            return ChatPrompt(list(prompt))
        case [*ids] if all(isinstance(i, int) for i in ids):
            return TokenPrompt(token_bytes(ids))
    raise TypeError(f"a prompt is text, token ids, or chat messages, not {type(prompt).__name__}")


# ---------------------------------------------------------------- transports


class Transport(Protocol):
    """Carries requests and their answers. Answers come on the event loop, by request, in order."""

    def submit(self, request: ClientRequest, on_answer: OnAnswer) -> int:
        """Send a request, which gets an id of its own; `on_answer` is called until the last answer has come."""

    def cancel(self, request_id: int) -> None:
        """Stop a request, if it is not finished; no further answer comes."""

    async def close(self) -> None:
        """Disconnect. Requests in flight are cancelled at the server and answered with an Error (503) here."""


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


class ZmqTransport:
    """Any number of requests in flight on one socket. Make it on the event loop that is to use it."""

    _reply = wire.Decoder(ClientReply)

    def __init__(self, address: str) -> None:
        self._pending: dict[int, _Pending] = {}
        self._ids = itertools.count(1)
        self._unconfirmed = False
        """A Cancel was sent: it may still be under way."""
        self._socket = wire.DealerSocket(address, self._receive, on_lost=self._lost)

    @property
    def connected(self) -> bool:
        """Whether the router is there now; without it, requests wait for it."""
        return self._socket.connected

    def submit(self, request: ClientRequest, on_answer: OnAnswer) -> int:
        """See Transport. ServerError (503) when the router does not read."""
        request.id = next(self._ids)
        if not self._socket.send(wire.encode(request)):
            raise ServerError(503, "the router does not read its messages", retry_after=1.0)
        self._pending[request.id] = _Pending(request, on_answer)
        return request.id

    def cancel(self, request_id: int) -> None:
        if self._pending.pop(request_id, None) is not None:
            self.tell(Cancel(request_id))

    def tell(self, message: Cancel) -> None:
        """Send a message about a request that is in flight."""
        self._unconfirmed = True
        self._socket.send(wire.encode(message))

    async def close(self, reason: str = "the connection was closed") -> None:
        for request_id in self._pending:
            self.tell(Cancel(request_id))
        self._fail_all(reason)
        try:
            if self._unconfirmed and self.connected:
                await self._confirm()
        finally:
            self._socket.close()
            self._fail_all(reason)

    async def _confirm(self) -> None:
        """Wait for any answer: messages arrive in order, so the cancels before the question have arrived too."""
        answered = asyncio.Event()
        with contextlib.suppress(TimeoutError, ServerError):
            self.submit(Ask(id=0, what="health"), lambda _: answered.set())
            await asyncio.wait_for(answered.wait(), FAREWELL_SECONDS)

    def _receive(self, payload: bytes) -> None:
        reply = self._reply.decode(payload)
        if not isinstance(reply, Deltas):
            if pending := self._pending.pop(reply.id, None):
                pending.give(reply)
            return
        for delta in reply.items:
            if pending := self._pending.get(delta.id):
                if delta.finish is not None and pending.open == 1:
                    del self._pending[delta.id]
                pending.give_delta(delta)

    def _lost(self) -> None:
        self._fail_all("the connection to the router was lost")

    def _fail_all(self, message: str) -> None:
        pending, self._pending = self._pending, {}
        for request_id, one in pending.items():
            one.fail(request_id, message)


class HttpTransport:
    """A request of the native protocol is one POST; cancelling it closes the connection."""

    _reply = msgspec.json.Decoder(ClientReply)
    _encode = msgspec.json.Encoder().encode

    def __init__(self, url: str, api_key: str = "") -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        self._client = httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=timeout)
        self._open: dict[int, tuple[asyncio.Task[None], _Pending]] = {}
        self._ids = itertools.count(1)

    def submit(self, request: ClientRequest, on_answer: OnAnswer) -> int:
        """See Transport."""
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


# ---------------------------------------------------------------- the async client


class AsyncClient:
    """What a program asks of radixrt. Every method raises ServerError when the server refuses or fails.

    A task that is cancelled while it waits cancels its request: the worker stops and frees its pages.
    """

    def __init__(
        self, transport: Transport, api_key: str = "", *, timeout: float = CONNECT_SECONDS, local: Any = None
    ) -> None:
        """`timeout` is how many seconds the server has to answer questions about itself."""
        self._transport = transport
        self._api_key = api_key
        self._timeout = timeout
        self._local = local
        self._closed = False

    @classmethod
    async def connect(cls, url: str, *, api_key: str = "", timeout: float = CONNECT_SECONDS) -> Self:
        """Connect and wait until somebody answers there; ConnectionError after `timeout` seconds without.

        ValueError for an address of no known kind, or a folder that holds no model; ServerError (401) for a key that
        the server does not know."""
        if url.startswith("local:"):
            from radixrt.launch import local_stack

            stack = await asyncio.to_thread(local_stack(url.removeprefix("local:")).__enter__)
            return cls(ZmqTransport(stack.address), local=stack)
        web = url.startswith(("http://", "https://"))
        client = cls(HttpTransport(url, api_key) if web else ZmqTransport(url), api_key, timeout=timeout)
        try:
            await client.health()
        except BaseException as problem:
            await client.close()
            if isinstance(problem, ServerError) and problem.code == 503:
                raise ConnectionError(f"nobody answers at {url.partition('#')[0]}: {problem.message}") from problem
            raise
        return client

    async def close(self) -> None:
        """Disconnect; requests in flight fail. Stops the router and worker of a `local:` client. Idempotent."""
        self._closed = True
        await self._transport.close()
        if self._local is not None:
            local, self._local = self._local, None
            await asyncio.to_thread(local.__exit__)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    # ------------------------------------------------------------ generation

    async def generate(self, prompt: PromptLike, sampling: Sampling = Sampling(), **options: Any) -> Completion:
        """One continuation of a prompt (text, token ids or chat messages). Options as of `generate_n`."""
        return (await self.generate_n(prompt, 1, sampling, **options))[0]

    async def generate_n(
        self,
        prompt: PromptLike,
        n: int,
        sampling: Sampling = Sampling(),
        *,
        model: str = "",
        origin: Origin = Origin(),
        cache_salt: str = "",
    ) -> list[Completion]:
        """`n` continuations of one prompt, which is computed once; choice i draws with seed + i."""
        request = self._generate(prompt, n, sampling, False, model, origin, cache_salt)
        completions: list[Completion | None] = [None] * n
        async with self._answers(request) as answers:
            while None in completions:
                delta = _expect(Delta, await answers.get())
                completions[delta.index] = Completion(
                    delta.text, delta.ids, delta.finish or "stop", delta.stop, delta.usage or Usage(), delta.logprobs
                )
        return completions

    async def stream(
        self,
        prompt: PromptLike,
        sampling: Sampling = Sampling(),
        *,
        n: int = 1,
        model: str = "",
        origin: Origin = Origin(),
        cache_salt: str = "",
    ) -> AsyncIterator[Delta]:
        """Deltas as they come; the last one of a choice has `finish` and `usage`. Closing the iterator cancels."""
        open_choices = n
        async with self._answers(self._generate(prompt, n, sampling, True, model, origin, cache_salt)) as answers:
            while open_choices:
                delta = _expect(Delta, await answers.get())
                open_choices -= delta.finish is not None
                yield delta

    def _generate(
        self,
        prompt: PromptLike,
        n: int,
        sampling: Sampling,
        stream: bool,
        model: str,
        origin: Origin,
        cache_salt: str,
    ) -> Generate:
        return Generate(
            id=0,
            prompt=as_prompt(prompt),
            sampling=sampling,
            model=model,
            n=n,
            stream=stream,
            origin=origin,
            api_key=self._api_key,
            cache_salt=cache_salt,
        )

    async def score(
        self,
        prompt: PromptLike,
        choices: Sequence[str | Sequence[int] | TextPrompt | TokenPrompt],
        *,
        model: str = "",
        origin: Origin = Origin(),
        cache_salt: str = "",
    ) -> Scored:
        """Natural log-probability of every token of each choice as a continuation of the prompt, in one round trip."""
        request = Score(
            id=0,
            prompt=as_prompt(prompt),
            choices=[as_prompt(choice) for choice in choices],
            model=model,
            origin=origin,
            api_key=self._api_key,
            cache_salt=cache_salt,
        )
        return await self._ask_for(Scored, request)

    # ------------------------------------------------------------ tokens and the server itself

    async def tokenize(self, prompt: PromptLike) -> list[int]:
        """Token ids that the server would compute for a prompt."""
        request = Tokenize(id=0, prompt=as_prompt(prompt), api_key=self._api_key)
        return token_list((await self._ask_for(Tokens, request)).ids)

    async def render(self, prompt: ChatPrompt) -> str:
        """The text that the model's chat template makes of messages; nothing is encoded for it."""
        request = Tokenize(id=0, prompt=prompt, render_only=True, api_key=self._api_key)
        return (await self._ask_for(Tokens, request)).text

    async def detokenize(self, ids: Sequence[int] | bytes) -> str:
        """The text of token ids, all at once, without special tokens. `bytes` are int32, little-endian."""
        request = Detokenize(id=0, ids=token_bytes(ids), api_key=self._api_key)
        return (await self._ask_for(Tokens, request)).text

    async def health(self) -> dict[str, Any]:
        """`serving`, `max_model_len`, `workers`, counters."""
        return await self._about("health")

    async def models(self) -> list[dict[str, Any]]:
        """Models that are served now: `id` and `max_model_len` in tokens."""
        return await self._about("models")

    async def report(self) -> dict[str, Any]:
        """The cache-hit-rate report; its shape is that of `radixrt.report.Report.to_json`."""
        return await self._about("report")

    async def metrics(self) -> str:
        """Figures in Prometheus' text format."""
        return await self._about("metrics")

    async def _about(self, what: str) -> Any:
        question = Ask(id=0, what=what, api_key=self._api_key)
        try:
            async with asyncio.timeout(self._timeout):
                return (await self._ask_for(Info, question)).data
        except TimeoutError:
            raise ServerError(503, "the router does not answer", retry_after=1.0) from None

    async def _ask_for(self, kind: type[T], request: ClientRequest) -> T:
        async with self._answers(request) as answers:
            return _expect(kind, await answers.get())

    @contextlib.asynccontextmanager
    async def _answers(self, request: ClientRequest) -> AsyncIterator[asyncio.Queue[Answer]]:
        """A queue of a request's answers; the request is cancelled when it is left before the last one.

        RuntimeError on a client that is closed."""
        if self._closed:
            raise RuntimeError("the client is closed")
        answers: asyncio.Queue[Answer] = asyncio.Queue()
        request_id = self._transport.submit(request, answers.put_nowait)
        try:
            yield answers
        finally:
            self._transport.cancel(request_id)


def _expect(kind: type[T], answer: Answer) -> T:
    if isinstance(answer, Error):
        raise ServerError(answer.code, answer.message, answer.field, answer.retry_after)
    if not isinstance(answer, kind):
        raise ServerError(500, f"the server answered with {type(answer).__name__}, not {kind.__name__}")
    return answer


# ---------------------------------------------------------------- the plain face


async def _await(work: Awaitable[T]) -> T:
    return await work


ON_THE_LOOP = "a plain Client cannot wait inside its own async code: await the AsyncClient, or the program"


class Portal:
    """An event loop in a thread of its own, for callers that have none."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="radixrt-client", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()

    def call(self, function: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> T:
        """Await `function(*args, **kwargs)` there. An interrupted wait (Ctrl-C) cancels it, and gives it
        `CANCEL_SECONDS` to end.

        RuntimeError once the portal is closed, and on the loop itself, which would wait for itself for ever."""
        if self.closed or self._is_here():
            raise RuntimeError("the client is closed" if self.closed else ON_THE_LOOP)
        call = _Call(functools.partial(function, *args, **kwargs))
        try:
            self._loop.call_soon_threadsafe(call.begin)
            return call.outcome.result()
        except BaseException:
            if not call.outcome.done():
                self._loop.call_soon_threadsafe(call.stop)
                with contextlib.suppress(concurrent.futures.CancelledError, concurrent.futures.TimeoutError):
                    call.outcome.exception(CANCEL_SECONDS)
            raise

    def _is_here(self) -> bool:
        return threading.current_thread() is self._thread

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """Items of an async iterator, pulled one by one; closing the generator closes it."""
        try:
            while True:
                try:
                    yield self.call(anext, items)
                except StopAsyncIteration:
                    return
        finally:
            # An iterator that was dropped may be collected late (closing the portal has closed it) and anywhere.
            if not self.closed and not self._is_here():
                self.call(items.aclose)

    def close(self) -> None:
        """End the loop and its thread; what others wait for there is cancelled. Idempotent."""
        if self.closed:
            return
        self.call(_cancel_others)
        self.call(self._loop.shutdown_asyncgens)
        self.call(self._loop.shutdown_default_executor)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=CANCEL_SECONDS)


class _Call:
    """Work on the loop that another thread waits for. An interrupt may hit that thread at any instruction, so all that
    counts happens on the loop, in the order of its callbacks: `begin`, if at all, before `stop`."""

    def __init__(self, work: Callable[[], Awaitable[Any]]) -> None:
        self.outcome: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._work = work
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(lambda _: self.outcome.cancel())  # it was stopped before its first step

    def stop(self) -> None:
        if self._task is None:
            self.outcome.cancel()
        else:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            self.outcome.set_result(await self._work())
        except asyncio.CancelledError:
            self.outcome.cancel()
        except BaseException as problem:  # SystemExit as well: it is the other thread's, and would end the loop
            self.outcome.set_exception(problem)


class Client:
    """`AsyncClient` without async: the same methods, which wait. It may be used by several threads."""

    def __init__(self, url: str, *, api_key: str = "", timeout: float = CONNECT_SECONDS) -> None:
        self._portal = Portal()
        try:
            self.aio = self._portal.call(AsyncClient.connect, url, api_key=api_key, timeout=timeout)
        except BaseException:
            self._portal.close()
            raise

    def generate(self, prompt: PromptLike, sampling: Sampling = Sampling(), **options: Any) -> Completion:
        """See AsyncClient.generate."""
        return self._portal.call(self.aio.generate, prompt, sampling, **options)

    def generate_n(
        self, prompt: PromptLike, n: int, sampling: Sampling = Sampling(), **options: Any
    ) -> list[Completion]:
        """See AsyncClient.generate_n."""
        return self._portal.call(self.aio.generate_n, prompt, n, sampling, **options)

    def stream(self, prompt: PromptLike, sampling: Sampling = Sampling(), **options: Any) -> Iterator[Delta]:
        """See AsyncClient.stream. Leaving the loop early cancels."""
        return self._portal.iterate(self.aio.stream(prompt, sampling, **options))

    def score(self, prompt: PromptLike, choices: Sequence[Any], **options: Any) -> Scored:
        """See AsyncClient.score."""
        return self._portal.call(self.aio.score, prompt, choices, **options)

    def tokenize(self, prompt: PromptLike) -> list[int]:
        """See AsyncClient.tokenize."""
        return self._portal.call(self.aio.tokenize, prompt)

    def render(self, prompt: ChatPrompt) -> str:
        """See AsyncClient.render."""
        return self._portal.call(self.aio.render, prompt)

    def detokenize(self, ids: Sequence[int] | bytes) -> str:
        """See AsyncClient.detokenize."""
        return self._portal.call(self.aio.detokenize, ids)

    def health(self) -> dict[str, Any]:
        """See AsyncClient.health."""
        return self._portal.call(self.aio.health)

    def models(self) -> list[dict[str, Any]]:
        """See AsyncClient.models."""
        return self._portal.call(self.aio.models)

    def report(self) -> dict[str, Any]:
        """See AsyncClient.report."""
        return self._portal.call(self.aio.report)

    def metrics(self) -> str:
        """See AsyncClient.metrics."""
        return self._portal.call(self.aio.metrics)

    def run(self, work: Awaitable[T]) -> T:
        """Run a coroutine on the client's event loop and wait for it."""
        try:
            return self._portal.call(_await, work)
        finally:
            if inspect.iscoroutine(work) and inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                work.close()  # it has not begun

    def close(self) -> None:
        """Disconnect; requests in flight fail. Idempotent."""
        if self._portal.closed:
            return
        try:
            self._portal.call(self.aio.close)
        finally:
            self._portal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
