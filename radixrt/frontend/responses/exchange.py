"""One request of the Responses API in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from radixrt.formats.parsing import Piece
from radixrt.frontend.generate.choice import Choice
from radixrt.frontend.generate.exchange import Exchange
from radixrt.frontend.http.codec import encode
from radixrt.frontend.http.errors import ApiError
from radixrt.frontend.responses.replies import ResponseReply
from radixrt.messages import TokenLogprob

Keep = Callable[[str, bytes, dict[str, Any]], None]
"""Called with a complete response: its id, its JSON, and its message in the format of chats."""


class ResponseExchange(Exchange[ResponseReply]):
    """The single choice of a response, in items. An error after the stream has begun is sent as an event."""

    def __init__(self, *args: Any, keep: Keep) -> None:
        super().__init__(*args)
        self._keep = keep
        self._body = b""

    def error_event(self, problem: ApiError) -> bytes:
        return self.reply.error(problem.code or f"{problem.status}", problem.message, problem.param or None)

    def _add(self, choice: Choice, pieces: list[Piece], logprobs: list[TokenLogprob] | None, last: bool) -> None:
        events = self.reply.add(pieces, logprobs or ())
        if self._streams and events:
            self.put(self.reply.events(*events))
        self.wake()

    def _end(self) -> None:
        choice = self.choices[0]
        events, response = self.reply.finish(choice.finish == "length", choice.usage, choice.ids)
        self._body = encode(response)
        self._keep(self.reply.id, self._body, choice.message.to_openai())
        if self._streams:
            self.put(self.reply.events(*events))
        self.finished = True
        self.wake()

    def whole(self) -> bytes:
        return self._body
