"""The synchronous client. The asynchronous one, and what both give and take, can be imported from here as well."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Iterator, Sequence
from typing import Any, Self, TypeVar, Unpack

from radixrt.client.async_client import AsyncClient
from radixrt.client.event_loop_thread import EventLoopThread
from radixrt.client.hints import CacheOutcome, Target
from radixrt.client.prompts import (
    Completion,
    GenerateOptions,
    Options,
    PromptLike,
    TextLike,
    WholePromptLike,
    as_prompt,
    token_bytes,
    token_list,
)
from radixrt.client.transports import CONNECT_SECONDS, ServerError
from radixrt.messages import ChatPrompt, Delta, LivePart, Sampling, Scored

__all__ = ["AsyncClient", "Client", "Completion", "ServerError", "as_prompt", "token_bytes", "token_list"]

T = TypeVar("T")


async def _await(work: Awaitable[T]) -> T:
    return await work


class Client:
    """The synchronous client: the methods of `AsyncClient`, blocking. Thread-safe."""

    def __init__(self, url: str, *, api_key: str = "", model: str = "", timeout: float = CONNECT_SECONDS) -> None:
        """See AsyncClient.connect."""
        self._loop_thread = EventLoopThread()
        try:
            self.aio = self._loop_thread.call(AsyncClient.connect, url, api_key=api_key, model=model, timeout=timeout)
        except BaseException:
            self._loop_thread.close()
            raise

    def generate(
        self, prompt: PromptLike, sampling: Sampling = Sampling(), **options: Unpack[GenerateOptions]
    ) -> Completion:
        """See AsyncClient.generate."""
        return self._loop_thread.call(self.aio.generate, prompt, sampling, **options)

    def generate_n(
        self, prompt: PromptLike, n: int, sampling: Sampling = Sampling(), **options: Unpack[GenerateOptions]
    ) -> list[Completion]:
        """See AsyncClient.generate_n."""
        return self._loop_thread.call(self.aio.generate_n, prompt, n, sampling, **options)

    def stream(
        self, prompt: PromptLike, sampling: Sampling = Sampling(), *, n: int = 1, **options: Unpack[GenerateOptions]
    ) -> Iterator[Delta]:
        """See AsyncClient.stream. Leaving the loop early cancels the request."""
        return self._loop_thread.iterate(self.aio.stream(prompt, sampling, n=n, **options))

    def score(self, prompt: PromptLike, choices: Sequence[TextLike], **options: Unpack[Options]) -> Scored:
        """See AsyncClient.score."""
        return self._loop_thread.call(self.aio.score, prompt, choices, **options)

    def tokenize(self, prompt: WholePromptLike) -> list[int]:
        """See AsyncClient.tokenize."""
        return self._loop_thread.call(self.aio.tokenize, prompt)

    def render(self, prompt: ChatPrompt) -> str:
        """See AsyncClient.render."""
        return self._loop_thread.call(self.aio.render, prompt)

    def detokenize(self, ids: Sequence[int] | bytes) -> str:
        """See AsyncClient.detokenize."""
        return self._loop_thread.call(self.aio.detokenize, ids)

    def health(self) -> dict[str, Any]:
        """See AsyncClient.health."""
        return self._loop_thread.call(self.aio.health)

    def models(self) -> list[dict[str, Any]]:
        """See AsyncClient.models."""
        return self._loop_thread.call(self.aio.models)

    def report(self) -> dict[str, Any]:
        """See AsyncClient.report."""
        return self._loop_thread.call(self.aio.report)

    def live(self, part: LivePart, of: str = "", most: int = 2000) -> dict[str, Any]:
        """See AsyncClient.live."""
        return self._loop_thread.call(self.aio.live, part, of, most)

    def metrics(self) -> str:
        """See AsyncClient.metrics."""
        return self._loop_thread.call(self.aio.metrics)

    def pin(
        self, prompt: PromptLike | None = None, *, seconds: float | None = None, **target: Unpack[Target]
    ) -> CacheOutcome:
        """See Hinting.pin."""
        return self._loop_thread.call(self.aio.pin, prompt, seconds=seconds, **target)

    def retain(
        self,
        prompt: PromptLike | None = None,
        *,
        priority: int = 50,
        seconds: float | None = None,
        **target: Unpack[Target],
    ) -> CacheOutcome:
        """See Hinting.retain."""
        return self._loop_thread.call(self.aio.retain, prompt, priority=priority, seconds=seconds, **target)

    def demote(self, prompt: PromptLike | None = None, **target: Unpack[Target]) -> CacheOutcome:
        """See Hinting.demote."""
        return self._loop_thread.call(self.aio.demote, prompt, **target)

    def prefetch(self, prompt: PromptLike | None = None, *, worker: str = "", **target: Unpack[Target]) -> CacheOutcome:
        """See Hinting.prefetch."""
        return self._loop_thread.call(self.aio.prefetch, prompt, worker=worker, **target)

    def share(self, prompt: PromptLike | None = None, *, worker: str, **target: Unpack[Target]) -> CacheOutcome:
        """See Hinting.share."""
        return self._loop_thread.call(self.aio.share, prompt, worker=worker, **target)

    def delete_cache(self) -> CacheOutcome:
        """See Hinting.delete_cache."""
        return self._loop_thread.call(self.aio.delete_cache)

    def drain_worker(self, name: str, *, restart: bool = False) -> dict[str, Any]:
        """See AsyncClient.drain_worker."""
        return self._loop_thread.call(self.aio.drain_worker, name, restart=restart)

    def clear_cache(self) -> None:
        """See AsyncClient.clear_cache."""
        self._loop_thread.call(self.aio.clear_cache)

    def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> dict[str, str]:
        """See AsyncClient.load_adapter."""
        return self._loop_thread.call(self.aio.load_adapter, name, path, in_place=in_place)

    def unload_adapter(self, name: str) -> None:
        """See AsyncClient.unload_adapter."""
        self._loop_thread.call(self.aio.unload_adapter, name)

    def run(self, work: Awaitable[T]) -> T:
        """Run a coroutine on the client's event loop and wait for it."""
        try:
            return self._loop_thread.call(_await, work)
        finally:
            if inspect.iscoroutine(work) and inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                work.close()  # never awaited, so without this Python would warn

    def close(self) -> None:
        """See AsyncClient.close. Several threads may call it at once."""
        self._loop_thread.close(self.aio.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
