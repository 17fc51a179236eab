"""One request of Ollama's API in flight."""

from __future__ import annotations

from typing import Any

from radixrt.client.transports import Answer
from radixrt.frontend.generate.choice import Choice
from radixrt.frontend.generate.exchange import Exchange, OnAnswer
from radixrt.frontend.http.errors import ApiError
from radixrt.frontend.http.ollama_errors import OllamaError
from radixrt.frontend.ollama.history import call_id
from radixrt.frontend.ollama.replies import OllamaReply
from radixrt.frontend.parsing import CallStart, Piece
from radixrt.messages import TokenLogprob


class OllamaExchange(Exchange[OllamaReply]):
    """The single choice, whole or line by line. `num_calls` are those in the history, after which its own are
    numbered."""

    def __init__(self, *args: Any, num_calls: int) -> None:
        super().__init__(*args)
        self._num_calls = num_calls

    def own_error(self, problem: ApiError) -> OllamaError:
        return OllamaError.wrap(problem)

    def error_event(self, problem: ApiError) -> bytes:
        return OllamaError.wrap(problem).body() + b"\n"

    def _take(self, first: int, on_answer: OnAnswer | None, answer: Answer) -> None:
        if self._streams:
            self.reply.arrived()
        super()._take(first, on_answer, answer)

    def _add(self, choice: Choice, pieces: list[Piece], logprobs: list[TokenLogprob] | None, last: bool) -> None:
        for piece in pieces:
            if isinstance(piece, CallStart):
                choice.message.calls[piece.index].id = call_id(piece.name, self._num_calls + piece.index)
        if self._streams and (lines := self.reply.lines(choice.message, pieces, last)):
            self.put(lines)
        self.wake()

    def _end(self) -> None:
        choice = self.choices[0]
        if self._streams:
            self.put(self.reply.last_line(choice.finish, choice.usage))
        self.finished = True
        self.wake()

    def whole(self) -> bytes:
        choice = self.choices[0]
        return self.reply.whole(choice.message, choice.finish, choice.usage)
