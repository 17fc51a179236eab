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
import inspect
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

from radixrt.messages import (
    Ask,
    ChatPrompt,
    ClientRequest,
    Delta,
    Detokenize,
    Error,
    Forget,
    Fork,
    Generate,
    Info,
    Origin,
    Pause,
    Sampling,
    Score,
    Scored,
    TextPrompt,
    Tokenize,
    TokenPrompt,
    Tokens,
    Usage,
)
from radixrt.portal import Portal
from radixrt.prompts import Completion, PromptLike, as_prompt, token_bytes, token_list
from radixrt.transports import CONNECT_SECONDS, Answer, HttpTransport, ServerError, Transport, ZmqTransport

if TYPE_CHECKING:
    from radixrt.local import LocalStack

T = TypeVar("T")
TELL_SECONDS = 1.0
"""A client that is closed waits so long for the server to read what it was told last."""


# ---------------------------------------------------------------- the async client


async def _entered(stack: LocalStack) -> LocalStack:
    """`stack`, entered in a thread, which cannot be stopped: if the task is cancelled, the stack ends as soon as it has
    begun."""

    def leave(entering: concurrent.futures.Future[LocalStack]) -> None:
        if not entering.cancelled() and not entering.exception():
            stack.__exit__()

    threads = concurrent.futures.ThreadPoolExecutor(1)
    entering = threads.submit(stack.__enter__)
    threads.shutdown(wait=False)
    try:
        return await asyncio.wrap_future(entering)
    except asyncio.CancelledError:
        entering.add_done_callback(leave)
        raise


class AsyncClient:
    """What a program asks of radixrt. Every method raises ServerError when the server refuses, fails or is not there,
    and RuntimeError on another event loop, or in another process, than it was first used on.

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
        self._tells: set[asyncio.Future[None]] = set()
        """Of what was told, until it is answered."""

    @classmethod
    async def connect(cls, url: str, *, api_key: str = "", timeout: float = CONNECT_SECONDS) -> Self:
        """Connect and wait until somebody answers there; ConnectionError after `timeout` seconds without. Later on a
        request waits as long for a router (ZMQ) that has gone; for an answer it waits as long as that takes.

        ValueError for an address of no known kind, or a folder that holds no model; ServerError (401) for a key that
        the server does not know."""
        if url.startswith("local:"):
            from radixrt.local import local_stack

            stack = await _entered(local_stack(url.removeprefix("local:")))
            return cls(ZmqTransport(stack.address), local=stack)
        web = url.startswith(("http://", "https://"))
        client = cls(HttpTransport(url, api_key) if web else ZmqTransport(url, timeout), api_key, timeout=timeout)
        try:
            await client.health()
        except BaseException as problem:
            await client.close()
            if isinstance(problem, ServerError) and problem.code == 503:
                raise ConnectionError(f"nobody answers at {url.partition('#')[0]}: {problem.message}") from problem
            raise
        return client

    async def close(self) -> None:
        """Disconnect; requests in flight fail, and what was told has `TELL_SECONDS` to arrive. Stops the router and
        worker of a `local:` client. Idempotent."""
        self._transport.check()
        try:
            await self._deliver()
        finally:
            self._closed = True
            try:
                await self._transport.close()
            finally:
                if self._local is not None:
                    local, self._local = self._local, None
                    await asyncio.to_thread(local.__exit__)

    async def _deliver(self) -> None:
        """Return when what was told is answered, and what is told then, or when the time for it is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TELL_SECONDS):
                while self._tells:
                    await asyncio.wait(self._tells)

    def check(self) -> None:
        """RuntimeError where requests are not taken: on a client that is closed, and on another event loop, or in
        another process, than it was first used on."""
        if self._closed:
            raise RuntimeError("the client is closed")
        self._transport.check()

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
        request = self._generate(prompt, n, sampling, False, model=model, origin=origin, cache_salt=cache_salt)
        completions: list[Completion | None] = [None] * max(n, 1)  # of less than one choice the answer is an error
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
        open_choices = max(n, 1)  # see generate_n
        request = self._generate(prompt, n, sampling, True, model=model, origin=origin, cache_salt=cache_salt)
        async with self._answers(request) as answers:
            while open_choices:
                delta = _expect(Delta, await answers.get())
                open_choices -= delta.finish is not None
                yield delta

    def _generate(self, prompt: PromptLike, n: int, sampling: Sampling, stream: bool, **options: Any) -> Generate:
        prompt, key = as_prompt(prompt), self._api_key
        return Generate(id=0, prompt=prompt, sampling=sampling, n=n, stream=stream, api_key=key, **options)

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

    # ------------------------------------------------------------ states

    def tell(self, message: Fork | Pause | Forget) -> asyncio.Future[None]:
        """Send a message now, whose answer does not matter. The future, which never fails, is done when the server will
        read it before what is sent next: at once where messages arrive in order, over HTTP when it is answered."""
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        message.api_key = self._api_key
        try:
            if not self._closed:
                self._transport.submit(message, lambda _: answered.done() or answered.set_result(None))
                self._tells.add(answered)
                answered.add_done_callback(self._tells.discard)
                if not self._transport.ordered:
                    return answered
        except ServerError:  # it does not read: nor will it what is sent next
            pass
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        told.set_result(None)
        return told

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

        RuntimeError as of `check`."""
        self.check()
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
        """See AsyncClient.close. Any thread may call it, several at once."""
        self._portal.close(self.aio.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
