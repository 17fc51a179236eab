"""Chats whose answers are remembered: what the HTTP front end and the router's text stage have in common.

prompt --encode--> ids, facts ... answer generated ... --remember--> the next turn's `encode`
"""

from __future__ import annotations

from collections import Counter
from typing import Any

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


class Conversations:
    """The sessions of one process, with `session_tokens` and a tokenizer; without, chats are encoded like any text."""

    def __init__(self, text: TextService, config: RouterConfig | FrontendConfig) -> None:
        self._text = text
        self._sessions: Sessions | None = None
        if text.tokenizer is not None and config.session_tokens > 0:
            self._sessions = Sessions(text.tokenizer, config.session_tokens, config.keep_thinking)

    @property
    def num_tokens(self) -> int:
        """Generated tokens that are kept."""
        return self._sessions.num_tokens if self._sessions else 0

    async def encode(self, prompt: Prompt, tenant: str, cache_salt: str) -> Encoded:
        """Ids of any prompt; answers in a chat as they were generated, if they were for this tenant and salt.
        FieldError on bad input."""
        if self._sessions is None or not isinstance(prompt, ChatPrompt):
            return Encoded(await self._text.encode(prompt), "")
        # As JSON, so that no tenant and salt run together into another's.
        namespace = _to_json([tenant, cache_salt]).decode()
        return await self._text.encode_chat(self._sessions, namespace, prompt)

    def remember(self, encoded: Encoded, message: dict[str, Any], ids: bytes) -> None:
        """Keep the ids of an answer that says no more and no less than `message`, as the client sees it."""
        if self._sessions is not None:
            self._sessions.remember(encoded, message, ids)


def facts(encoded: Encoded) -> SessionFacts:
    """What became of the answers in a chat, in numbers."""
    dropped = Counter(_reason(note.partition(": ")[2]) for note in encoded.dropped)
    return SessionFacts(encoded.kept_turns, len(encoded.respelled), dict(dropped))


def _reason(why: str) -> Any:
    return next((reason for start, reason in _REASONS.items() if why.startswith(start)), "not_found")
