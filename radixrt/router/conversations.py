"""Chats whose answers are remembered: what the HTTP front end and the router's text stage have in common.

prompt --encode--> ids, facts ... answer generated ... --remember--> the next turn's `encode`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from radixrt.config import FrontendConfig, RouterConfig
from radixrt.messages import ChatPrompt, Prompt, SessionFacts
from radixrt.router.tokens import Encoded, Sessions, TextService

_to_json = msgspec.json.Encoder().encode
_REASONS = {
    "the template drops its thinking": "thinking",
    "the template drops ": "opening",
    "the template writes it differently": "rewritten",
}
"""What notes on dropped answers begin with, and what they are counted under."""


class Peers(Protocol):
    """Other processes with sessions; values are theirs who have the same tenant."""

    def share(self, entries: Sequence[tuple[bytes, bytes | None]], api_key: str) -> None:
        """Keep values for all."""

    async def recall(self, keys: Sequence[bytes], api_key: str) -> list[bytes | None]:
        """Values of keys, None for unknown ones."""


class Conversations:
    """The sessions of one process, with `session_tokens` and a tokenizer; without, chats are encoded like any text.
    With `peers`, answers that they have generated are known here too."""

    def __init__(self, text: TextService, config: RouterConfig | FrontendConfig, peers: Peers | None = None) -> None:
        self._text = text
        self._peers = peers
        self._sessions: Sessions | None = None
        if text.tokenizer is not None and config.session_tokens > 0:
            self._sessions = Sessions(text.tokenizer, config.session_tokens, config.keep_thinking)

    @property
    def num_tokens(self) -> int:
        """Generated tokens that are kept."""
        return self._sessions.num_tokens if self._sessions else 0

    async def encode(self, prompt: Prompt, tenant: str, cache_salt: str, api_key: str = "") -> Encoded:
        """Ids of any prompt; answers in a chat as they were generated, if they were for this tenant and salt.
        FieldError on bad input."""
        if self._sessions is None or not isinstance(prompt, ChatPrompt):
            return Encoded(await self._text.encode(prompt), "")
        # The tenant as JSON, which has no line feeds, so that no tenant and salt run together into another's.
        namespace = f"{_to_json(tenant).decode()}\n{cache_salt}"
        if self._peers is not None and (missing := self._sessions.missing(namespace, prompt)):
            for key, value in zip(missing, await self._peers.recall(missing, api_key), strict=True):
                if value is not None:
                    self._sessions.learn(namespace, key, value)
        return await self._text.encode_chat(self._sessions, namespace, prompt)

    def remember(self, encoded: Encoded, message: dict[str, Any], ids: bytes, api_key: str = "") -> None:
        """Keep the ids of an answer that says no more and no less than `message`, as the client sees it."""
        if self._sessions is None:
            return
        key = self._sessions.remember(encoded, message, ids)
        if self._peers is not None and key is not None and (value := self._sessions.export(key)):
            self._peers.share([(key, value)], api_key)


def facts(encoded: Encoded) -> SessionFacts:
    """What became of the answers in a chat, in numbers."""
    if not (encoded.kept_turns or encoded.dropped):
        return SessionFacts()
    dropped = Counter(_reason(note.partition(": ")[2]) for note in encoded.dropped)
    return SessionFacts(encoded.kept_turns, len(encoded.respelled), dict(dropped))


def _reason(why: str) -> Any:
    return next((reason for start, reason in _REASONS.items() if why.startswith(start)), "not_found")
