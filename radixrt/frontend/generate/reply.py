"""What an exchange needs of the format of its API's answers."""

from __future__ import annotations

from typing import Any

import msgspec

from radixrt.frontend.generate.request import Reported
from radixrt.frontend.http.auth import REQUEST_ID
from radixrt.messages import Usage
from radixrt.tokens import Encoded, Tokenizer

WARNING = "x-radixrt-warning"
"""The header that names what of a request is not followed, where that is no reason to refuse it."""
MAX_WARNING = 1024
"""The most characters of it."""


class BaseReply:
    """Formats the answer to one HTTP request, which has an `id`."""

    id: str
    content_type = b"text/event-stream; charset=utf-8"
    """Of a stream."""
    of_content = False
    """Whether log-probabilities are reported for the content's tokens only: not for thoughts, calls, and the token that
    ends the answer."""

    def __init__(self, model: str, tokenizer: Tokenizer | None) -> None:
        self.model = model
        self.session: dict[str, Any] = {}
        """See `session_json`."""
        self.reported = Reported()
        self.warnings: tuple[str, ...] = ()
        """See `Output.warnings`."""
        self.max_tokens: int | None = None
        """For how many tokens there is room within the front end's own limit, if more were asked for."""
        self._tokenizer = tokenizer

    @property
    def headers(self) -> dict[str, str]:
        """Those of the answer."""
        found = {REQUEST_ID: self.id}
        if self.warnings:  # names within may have any characters
            found[WARNING] = "; ".join(self.warnings).encode("unicode_escape").decode()[:MAX_WARNING]
        return found

    def about(self, usage: Usage) -> dict[str, Any]:
        """The `radixrt` field of the answer. It has max_tokens if there was room for fewer than asked for."""
        explained = {} if usage.explain is msgspec.UNSET else {"explain": usage.explain}
        most = self.max_tokens if usage.max_tokens is msgspec.UNSET else usage.max_tokens
        cut = {} if most is None else {"max_tokens": most}
        return {"worker": usage.worker} | self.session | cut | explained

    def begin(self) -> None:
        """Begin a stream."""

    def opening(self, index: int, prompt_ids: bytes | None) -> bytes:
        """The events before the first text of a choice; with `prompt_ids` if token ids are reported."""
        return b""

    def count(self, prompt_tokens: int, tokens: int) -> None:
        """Set the usage so far, which the next chunks have if that is asked for."""


def session_json(encoded: Encoded) -> dict[str, Any]:
    """The part of a reply's `radixrt` field about answers in the chat that were generated here; {} if there are none.
    Notes number messages as the chat template gets them."""
    if not encoded.kept_turns and not encoded.dropped:
        return {}
    notes = {"respelled": list(encoded.respelled), "dropped": list(map(str, encoded.dropped))}
    return {"session": {"kept_turns": encoded.kept_turns} | {name: found for name, found in notes.items() if found}}
