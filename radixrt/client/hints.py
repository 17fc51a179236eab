"""Hints to the server's cache, as methods of the clients."""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

import msgspec

from radixrt.client.prompts import PromptLike, as_prompt
from radixrt.messages import CacheAction, CacheResult, ChatPrompt, ControlCache

TAIL_TOKENS = 32
"""The most tokens that a chat template writes between an answer and the next one, if nothing is said there."""


class CacheOutcome(msgspec.Struct, frozen=True):
    """What became of a hint: for `tokens` tokens it is as asked for, `bytes` of KV; on `worker`. `reason`: of what is
    not. After `retry_after` seconds a tenant that has given too many may give another."""

    result: CacheResult
    tokens: int = 0
    bytes: int = 0
    worker: str = ""
    reason: str = ""
    retry_after: float = 0.0


class Target(TypedDict, total=False):
    """Which tokens are meant, beside the prompt: [token_start, token_end) of them. `session`, in the place of a prompt:
    all states of a program's scope. `model` and `cache_salt` as for requests."""

    token_start: int
    token_end: int | None
    session: str
    model: str
    cache_salt: str


class Hinting:
    """The methods of an asynchronous client that give hints to the cache: a request is right without them. Each returns
    what became of it. A prompt is what a request may have: text, token ids, messages, a ChatPrompt with tools, or a
    StatePrompt without anything said since."""

    async def control_cache(self, message: ControlCache) -> dict[str, Any]:
        """Send a hint. Returns what became of it, as ControlCache describes it."""
        raise NotImplementedError

    async def pin(
        self, prompt: PromptLike | None = None, *, seconds: float | None = None, **target: Unpack[Target]
    ) -> CacheOutcome:
        """Protect a prompt's tokens from eviction for so many seconds (None: an hour, the most), as far as the tenant's
        share allows, and running requests do not need their pages."""
        return await self.hint(CacheAction("pin", seconds=seconds), prompt, **target)

    async def retain(
        self,
        prompt: PromptLike | None = None,
        *,
        priority: int = 50,
        seconds: float | None = None,
        **target: Unpack[Target],
    ) -> CacheOutcome:
        """Evict a prompt's tokens after all that is not retained, and after what has a lower priority (0 to 100), for
        so many seconds (None: a day, the most)."""
        return await self.hint(CacheAction("retain", priority=priority, seconds=seconds), prompt, **target)

    async def demote(self, prompt: PromptLike | None = None, **target: Unpack[Target]) -> CacheOutcome:
        """Move a prompt's tokens from the device to the memory below it now, except those that others use."""
        return await self.hint(CacheAction("demote"), prompt, **target)

    async def prefetch(
        self, prompt: PromptLike | None = None, *, worker: str = "", **target: Unpack[Target]
    ) -> CacheOutcome:
        """Move a prompt's tokens to the device before the request comes: of that worker, or of the one that has
        most."""
        return await self.hint(CacheAction("prefetch", destination=worker), prompt, **target)

    async def share(self, prompt: PromptLike | None = None, *, worker: str, **target: Unpack[Target]) -> CacheOutcome:
        """Let another worker have a prompt's tokens without computing them, over a store that both read."""
        return await self.hint(CacheAction("share", destination=worker), prompt, **target)

    async def delete_cache(self) -> CacheOutcome:
        """Delete all that the tenant of the key has: KV on all tiers of all workers, sessions, stored responses and
        program states. What running requests use goes as they end."""
        return await self.hint(CacheAction("delete"))

    async def hint(
        self,
        action: CacheAction,
        prompt: PromptLike | None = None,
        *,
        token_start: int = 0,
        token_end: int | None = None,
        session: str = "",
        model: str = "",
        cache_salt: str = "",
    ) -> CacheOutcome:
        """Give any hint. Raises ServerError as requests do."""
        if token_start or token_end is not None:
            action = msgspec.structs.replace(action, token_start=token_start, token_end=token_end)
        target = None if prompt is None else as_prompt(prompt)
        ends = isinstance(target, ChatPrompt) and target.messages and target.messages[-1].get("role") == "assistant"
        message = ControlCache(
            id=0,
            action=action,
            prompt=target,
            session=session,
            tail=TAIL_TOKENS if ends else 0,
            model=model,
            cache_salt=cache_salt,
        )
        return msgspec.convert(await self.control_cache(message), CacheOutcome)
