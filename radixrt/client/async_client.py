"""The asynchronous client, over ZMQ, HTTP or in-process.

    AsyncClient.connect("tcp://127.0.0.1:5555")     a router's ZMQ socket (or ipc://, inproc://)
    AsyncClient.connect("http://127.0.0.1:8000")    an HTTP front end
    AsyncClient.connect("local:FOLDER")             a router and a worker in threads of this process

The messages are the same in all cases; only the `Transport` differs.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from radixrt.client.hints import Hinting
from radixrt.client.prompts import (
    Completion,
    GenerateOptions,
    PromptLike,
    TextLike,
    WholePromptLike,
    as_prompt,
    token_bytes,
    token_list,
)
from radixrt.client.transports import CONNECT_SECONDS, Answer, HttpTransport, ServerError, Transport, ZmqTransport
from radixrt.messages import (
    Ask,
    CacheAction,
    ChangeAdapter,
    ChatPrompt,
    ClearCache,
    ClientRequest,
    ControlCache,
    Delta,
    Detokenize,
    Done,
    DrainWorker,
    Error,
    Forget,
    Fork,
    Generate,
    Info,
    Live,
    LivePart,
    Origin,
    Pause,
    Sampling,
    Score,
    Scored,
    Tokenize,
    Tokens,
)
from radixrt.messages.requests import Query

if TYPE_CHECKING:
    from radixrt.client.local import LocalStack

T = TypeVar("T")
TELL_SECONDS = 1.0
"""`close` waits this long for the server to reply to the last messages of `tell`."""


async def _entered(stack: LocalStack) -> LocalStack:
    """Enter `stack` in a thread, which cannot be interrupted: if this task is cancelled, the stack is stopped as soon
    as it has started."""

    def leave(entering: concurrent.futures.Future[LocalStack]) -> None:
        if not entering.cancelled() and not entering.exception():
            stack.__exit__()

    executor = concurrent.futures.ThreadPoolExecutor(1)
    entering = executor.submit(stack.__enter__)
    executor.shutdown(wait=False)
    try:
        return await asyncio.wrap_future(entering)
    except asyncio.CancelledError:
        entering.add_done_callback(leave)
        raise


class AsyncClient(Hinting):
    """An asynchronous client. Methods raise ServerError if the server refuses or fails a request, or cannot be reached,
    and RuntimeError on another event loop or in another process than the client was first used on.

    Cancelling a task that waits for a request cancels the request: the worker stops it and frees its pages.
    """

    def __init__(
        self,
        transport: Transport,
        api_key: str = "",
        *,
        model: str = "",
        timeout: float = CONNECT_SECONDS,
        local: Any = None,
    ) -> None:
        """`model`: of requests that do not name one, such as those of programs; empty: the server's. `timeout`: seconds
        to wait for replies to `health`, `models`, `report` and `metrics`."""
        self._transport = transport
        self._api_key = api_key
        self._model = model
        self._timeout = timeout
        self._local = local
        self._closed = False
        self._unanswered: set[asyncio.Future[None]] = set()
        """Futures of messages of `tell` that the server has not replied to yet."""

    @classmethod
    async def connect(cls, url: str, *, api_key: str = "", model: str = "", timeout: float = CONNECT_SECONDS) -> Self:
        """Connect, and wait up to `timeout` seconds for the server to answer. Over ZMQ, a later request waits as long
        for a router that is disconnected. The time until a request is answered is not limited. `model`: see __init__;
        whether it is served is known when a request is made.

        Raises ConnectionError if the server does not answer, ValueError for an invalid address or a folder without a
        model, and ServerError (401) for an unknown API key."""
        if url.startswith("local:"):
            from radixrt.client.local import local_stack

            stack = await _entered(local_stack(url.removeprefix("local:")))
            return cls(ZmqTransport(stack.address), model=model, local=stack)
        web = url.startswith(("http://", "https://"))
        transport = HttpTransport(url, api_key) if web else ZmqTransport(url, timeout)
        client = cls(transport, api_key, model=model, timeout=timeout)
        try:
            await client.health()
        except BaseException as problem:
            await client.close()
            if isinstance(problem, ServerError) and problem.code == 503:
                raise ConnectionError(f"nobody answers at {url.partition('#')[0]}: {problem.message}") from problem
            raise
        return client

    async def close(self) -> None:
        """Disconnect. Requests in flight fail; messages of `tell` have TELL_SECONDS to arrive. Stops the router and
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
        """Wait until all messages of `tell` are answered, also those sent meanwhile, for up to TELL_SECONDS."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TELL_SECONDS):
                while self._unanswered:
                    await asyncio.wait(self._unanswered)

    def check(self) -> None:
        """Raise RuntimeError if the client is closed, or this is another event loop or process than it was first used
        on."""
        if self._closed:
            raise RuntimeError("the client is closed")
        self._transport.check()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    # ------------------------------------------------------------ generation

    async def generate(
        self, prompt: PromptLike, sampling: Sampling = Sampling(), **options: Unpack[GenerateOptions]
    ) -> Completion:
        """One continuation of a prompt (text, token ids or chat messages). Options as for `generate_n`.

        An answer to a chat is parsed by the model's own format: `content`, `reasoning`, and the `tool_calls` of the
        tools in a `ChatPrompt(messages, tools)`, both in OpenAI's format; `to_openai()` is the message for the next
        prompt."""
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
        priority: int = 0,
        cache: Sequence[CacheAction] = (),
    ) -> list[Completion]:
        """`n` continuations of one prompt, which is computed once. Choice i is sampled with seed + i. While requests of
        the same tenant wait, those of the lowest `priority` are computed first. `cache`: what is to become of the
        tokens of the prompt and the first choice in the cache when that has ended (`pin`, `retain`, `demote`)."""
        options: dict[str, Any] = {"cache_salt": cache_salt, "priority": priority, "cache": list(cache)}
        request = self._generate(prompt, n, sampling, False, model=model, origin=origin, **options)
        completions = [Completion() for _ in range(max(n, 1))]  # the reply to n < 1 is an error
        async with self._answers(request) as answers:
            for _ in completions:  # each has one delta
                delta = _expect(Delta, await answers.get())
                completions[delta.index].add(delta)
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
        priority: int = 0,
        cache: Sequence[CacheAction] = (),
    ) -> AsyncGenerator[Delta, None]:
        """Deltas as they arrive; the last one of a choice has `finish` and `usage`, and of a chat the parsed `message`.
        Closing the iterator cancels the request."""
        open_choices = max(n, 1)  # see generate_n
        options: dict[str, Any] = {"cache_salt": cache_salt, "priority": priority, "cache": list(cache)}
        request = self._generate(prompt, n, sampling, True, model=model, origin=origin, **options)
        async with self._answers(request) as answers:
            while open_choices:
                delta = _expect(Delta, await answers.get())
                open_choices -= delta.finish is not None
                yield delta

    def _generate(
        self, prompt: PromptLike, n: int, sampling: Sampling, stream: bool, *, model: str, **options: Any
    ) -> Generate:
        prompt, key, model = as_prompt(prompt), self._api_key, model or self._model
        return Generate(id=0, prompt=prompt, sampling=sampling, n=n, stream=stream, model=model, api_key=key, **options)

    async def score(
        self,
        prompt: PromptLike,
        choices: Sequence[TextLike],
        *,
        model: str = "",
        origin: Origin = Origin(),
        cache_salt: str = "",
        priority: int = 0,
    ) -> Scored:
        """Natural log-probabilities of the tokens of each choice as a continuation of the prompt, in one round trip."""
        request = Score(
            id=0,
            prompt=as_prompt(prompt),
            choices=[as_prompt(choice) for choice in choices],
            model=model or self._model,
            origin=origin,
            api_key=self._api_key,
            cache_salt=cache_salt,
            priority=priority,
        )
        return await self._ask_for(Scored, request)

    # ------------------------------------------------------------ states

    def tell(self, message: Fork | Pause | Forget) -> asyncio.Future[None]:
        """Send a message whose reply is ignored. The future is done, and never fails, once the server is certain to
        read the message before later ones: at once over a transport that keeps the order, over HTTP when it replies."""
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def note(_: Answer) -> None:
            if not answered.done():
                answered.set_result(None)

        message.api_key = self._api_key
        try:
            if not self._closed:
                self._transport.submit(message, note)
                self._unanswered.add(answered)
                answered.add_done_callback(self._unanswered.discard)
                if not self._transport.ordered:
                    return answered
        except ServerError:  # the server does not read; later requests will report that
            pass
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    # ------------------------------------------------------------ tokens, and the state of the server

    async def tokenize(self, prompt: WholePromptLike) -> list[int]:
        """The token ids of a prompt, as the server encodes it."""
        request = Tokenize(id=0, prompt=as_prompt(prompt), api_key=self._api_key)
        return token_list((await self._ask_for(Tokens, request)).ids)

    async def render(self, prompt: ChatPrompt) -> str:
        """The text of a chat as the model's chat template renders it. Nothing is encoded, so this is cheap."""
        request = Tokenize(id=0, prompt=prompt, render_only=True, api_key=self._api_key)
        return (await self._ask_for(Tokens, request)).text

    async def detokenize(self, ids: Sequence[int] | bytes) -> str:
        """The text of token ids, without special tokens. `bytes` are little-endian int32."""
        request = Detokenize(id=0, ids=token_bytes(ids), api_key=self._api_key)
        return (await self._ask_for(Tokens, request)).text

    async def health(self) -> dict[str, Any]:
        """The router's health: `serving`, `max_model_len`, `workers`; with the key of a tenant its own figures as well,
        and with the admin's key, or where there are no keys, all."""
        return await self._query("health")

    async def models(self) -> list[dict[str, Any]]:
        """Models that are served now: `id`, and `max_model_len` in tokens; LoRA adapters of these, with their model as
        `parent`."""
        return await self._query("models")

    async def check_model(self, name: str) -> str:
        """The name of the model or LoRA adapter that serves requests for `name`: another one for an alias. Raises
        ServerError (404) if there is none."""
        return await self._query("model", name)

    async def report(self) -> dict[str, Any]:
        """The cache-hit-rate report, as `radixrt.report.Report.to_json` describes it."""
        return await self._query("report")

    async def live(self, part: LivePart, of: str = "", most: int = 2000) -> dict[str, Any]:
        """A part of what the live page shows, as `messages.Live` describes it. Raises ServerError (404) for a request
        or a node that is not known."""
        return await self._told(Live(id=0, part=part, of=of, most=most, api_key=self._api_key))

    async def metrics(self) -> str:
        """Metrics in Prometheus' text format."""
        return await self._query("metrics")

    async def clear_cache(self) -> None:
        """Empty the caches of all workers, except for what running requests and pins hold: requests sent later find
        them empty. For benchmarks, and for weights that have changed. Raises ServerError (401, 403) where API keys are
        configured, and this is not the admin's."""
        await self._ask_for(Done, ClearCache(id=0, api_key=self._api_key))

    async def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> dict[str, str]:
        """Load a LoRA adapter from a folder on the workers' machines as model `name`; one that is loaded is replaced
        only with `in_place`. Requests that have the former one finish with it. Returns why workers could not load it,
        by worker; they do not serve it. Raises ServerError if none could, and (401, 403) if the server does not allow
        it, or not with this key."""
        return await self.change_adapter(
            ChangeAdapter(id=0, name=name, path=path, in_place=in_place, api_key=self._api_key)
        )

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter; requests that have it finish with it. Raises ServerError as `load_adapter`, and (404)
        if there is none of that name."""
        await self.change_adapter(ChangeAdapter(id=0, name=name, api_key=self._api_key))

    async def change_adapter(self, message: ChangeAdapter) -> dict[str, str]:
        """Load or unload a LoRA adapter, as the message says. Returns and raises as `load_adapter`."""
        return (await self._ask_for(Info, message)).data

    async def control_cache(self, message: ControlCache) -> dict[str, Any]:
        """Send a hint to the cache. Returns what became of it, as ControlCache describes it."""
        message.api_key = message.api_key or self._api_key
        message.model = message.model or self._model
        return (await self._ask_for(Info, message)).data

    async def drain_worker(self, name: str, *, restart: bool = False) -> dict[str, Any]:
        """Let a worker finish its requests, without new ones, and leave; requests that take longer than the server's
        --shutdown-timeout continue elsewhere. With `restart` the process that started it starts it again. Returns when
        it has left. Raises ServerError (404) if no worker of that name serves, (409) if it is the only one, unless it
        is to be restarted, and (401, 403) if the key is not the admin's where there are keys."""
        return await self.send_drain(DrainWorker(id=0, worker=name, restart=restart, api_key=self._api_key))

    async def send_drain(self, message: DrainWorker) -> dict[str, Any]:
        """As `drain_worker`, as the message says."""
        return (await self._ask_for(Info, message)).data

    async def _query(self, what: Query, model: str = "") -> Any:
        return await self._told(Ask(id=0, what=what, model=model, api_key=self._api_key))

    async def _told(self, request: Ask | Live) -> Any:
        try:
            async with asyncio.timeout(self._timeout):
                return (await self._ask_for(Info, request)).data
        except TimeoutError:
            raise ServerError(503, "the router does not answer", retry_after=1.0) from None

    async def _ask_for(self, kind: type[T], request: ClientRequest) -> T:
        """Send a request that has one reply, of type `kind`."""
        async with self._answers(request) as answers:
            return _expect(kind, await answers.get())

    @contextlib.asynccontextmanager
    async def _answers(self, request: ClientRequest) -> AsyncIterator[asyncio.Queue[Answer]]:
        """Send a request; in the context there is a queue of its replies. Leaving it before the last reply cancels the
        request. Raises RuntimeError as `check` does."""
        self.check()
        answers: asyncio.Queue[Answer] = asyncio.Queue()
        request_id = self._transport.submit(request, answers.put_nowait)
        try:
            yield answers
        finally:
            self._transport.cancel(request_id)


def _expect(kind: type[T], answer: Answer) -> T:
    """`answer`, if it has type `kind`. Raises ServerError otherwise."""
    if isinstance(answer, Error):
        raise ServerError(answer.code, answer.message, answer.field, answer.retry_after, answer.reason)
    if not isinstance(answer, kind):
        raise ServerError(500, f"the server answered with {type(answer).__name__}, not {kind.__name__}")
    return answer
