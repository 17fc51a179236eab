"""Chats whose generated token ids are kept; used by the HTTP front end and by the router.

prompt --encode--> ids, facts ... answer generated ... --remember--> the next turn's `encode`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from radixrt.config import FrontendConfig, RouterConfig
from radixrt.messages import ChatPrompt, Namespace, Prompt, SessionFacts
from radixrt.tokens import Encoded, Sessions, TextService
from radixrt.tokens.errors import Room
from radixrt.tokens.sessions import AnswerKeys
from radixrt.tokens.text import is_short_chat
from radixrt.tokens.turns import in_one_step


class SharedStore(Protocol):
    """Where answers are kept beyond this process' sessions: for other processes, and for later ones. Separately for
    each tenant; `api_key` is one of its keys or, within the router, its name."""

    def share(self, entries: Sequence[tuple[bytes, bytes | None]], api_key: str) -> None:
        """Store (key, value) entries for all processes."""

    async def recall(self, keys: Sequence[bytes], api_key: str) -> list[bytes | None]:
        """The values of keys; None for unknown ones."""

    def touch(self, keys: Sequence[bytes], api_key: str) -> None:
        """These keys were used: values of others are dropped before theirs."""


class Conversations:
    """The sessions of one process. Without `session_tokens` or a tokenizer there are none, and chats are encoded like
    any text. With `shared_store`, answers that other processes, or earlier ones, have generated are known as well."""

    def __init__(
        self, text: TextService, config: RouterConfig | FrontendConfig, shared_store: SharedStore | None = None
    ) -> None:
        self._text = text
        self._shared_store = shared_store
        kept, tokenizer = config.session_tokens, text.tokenizer
        options = {"keep_thinking": config.keep_thinking, "keep_calls": config.keep_generated_calls}
        self._sessions = Sessions(tokenizer, kept, **options) if tokenizer is not None and kept > 0 else None
        if shared_store is not None:
            _ = text.fingerprint  # now, as it takes a large vocabulary some time

    @property
    def num_tokens(self) -> int:
        """The number of generated tokens that are kept."""
        return self._sessions.num_tokens if self._sessions else 0

    async def encode(
        self,
        prompt: Prompt,
        tenant: str,
        cache_salt: str,
        api_key: str = "",
        room: Room | None = None,
        last: int | None = None,
    ) -> Encoded:
        """Token ids of any prompt; `room` and `last` as for `TextService.encode`. Answers in a chat have the ids with
        which they were generated for this tenant and salt. Raises FieldError on bad input."""
        namespace = Namespace(tenant, salt=cache_salt)
        sessions = self._sessions
        if sessions is None or not isinstance(prompt, ChatPrompt):
            return Encoded(await self._text.encode(prompt, namespace, room, last), "")
        keys = AnswerKeys()
        if self._shared_store is not None:
            keys = await self._answers_in(sessions, namespace, prompt)
            if keys.kept:
                self._shared_store.touch(keys.kept, api_key)
            values = await self._shared_store.recall(keys.missing, api_key) if keys.missing else []
            for key, value in zip(keys.missing, values, strict=True):
                if value is not None:
                    sessions.learn(namespace, key, value)
        return await self._text.encode_chat(sessions, namespace, prompt, room, keys.all)

    async def _answers_in(self, sessions: Sessions, namespace: Namespace, prompt: ChatPrompt) -> AnswerKeys:
        """`Sessions.answers_in`; for a long chat, in a thread."""
        if is_short_chat(prompt):
            return sessions.answers_in(namespace, prompt)
        work = in_one_step(sessions.answers_in, namespace, prompt)
        return await self._text.run(namespace, work, "messages")

    def forget(self, is_meant: Callable[[str], bool]) -> None:
        """Drop the answers of the tenants that are meant from this process, and the ids of their texts."""
        if self._sessions is not None:
            self._sessions.forget(is_meant)
        if self._text.tokenizer is not None:
            self._text.tokenizer.forget(is_meant)

    def remember(self, encoded: Encoded, message: dict[str, Any], ids: bytes, api_key: str = "") -> None:
        """Keep the ids of an answer; `message` is the same answer as the client sees it."""
        if self._sessions is None:
            return
        key = self._sessions.remember(encoded, message, ids)
        if self._shared_store is not None and key is not None and (value := self._sessions.export(key)):
            self._shared_store.share([(key, value)], api_key)


def facts(encoded: Encoded) -> SessionFacts:
    """Counts of the answers in a chat that kept their ids, and that lost them, by reason."""
    if not (encoded.kept_turns or encoded.dropped):
        return SessionFacts()
    dropped = Counter(answer.reason for answer in encoded.dropped)
    return SessionFacts(encoded.kept_turns, len(encoded.respelled), dict(dropped))
