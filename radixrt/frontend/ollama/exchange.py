"""One request of Ollama's API in flight."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from radixrt.client.transports import Answer
from radixrt.formats.message import ToolCall
from radixrt.formats.output import TEXT, Output
from radixrt.formats.parsing import Piece
from radixrt.frontend.generate.choice import Choice
from radixrt.frontend.generate.exchange import Exchange, OnAnswer
from radixrt.frontend.http.errors import ApiError
from radixrt.frontend.http.ollama_errors import OllamaError
from radixrt.frontend.ollama.history import call_id
from radixrt.frontend.ollama.replies import OllamaReply
from radixrt.messages import Generate, TokenLogprob


class OllamaExchange(Exchange[OllamaReply]):
    """The single choice, whole or line by line. `num_calls` are those in the history."""

    def __init__(self, *args: Any, num_calls: int) -> None:
        super().__init__(*args)
        self._num_calls = num_calls

    def submit(
        self, request: Generate, echo: str | None = None, output: Output = TEXT, on_answer: OnAnswer | None = None
    ) -> None:
        super().submit(request, echo, output, on_answer and functools.partial(self._tell, on_answer))

    def _tell(self, on_answer: OnAnswer, choice: Choice) -> None:
        """Pass an answer on, and then as clients send it back that drop the ids of calls: numbered by History."""
        on_answer(choice)
        calls = choice.message.calls
        given = [call.id for call in calls]
        numbered = [call_id(call.name, number) for number, call in enumerate(calls, self._num_calls)]
        if numbered != given:
            _set_ids(calls, numbered)
            on_answer(choice)
            _set_ids(calls, given)

    def own_error(self, problem: ApiError) -> OllamaError:
        return OllamaError.wrap(problem)

    def error_event(self, problem: ApiError) -> bytes:
        return OllamaError.wrap(problem).body() + b"\n"

    def _take(self, first: int, on_answer: OnAnswer | None, answer: Answer) -> None:
        if self._streams:
            self.reply.arrived()
        super()._take(first, on_answer, answer)

    def _add(self, choice: Choice, pieces: list[Piece], logprobs: list[TokenLogprob] | None, last: bool) -> None:
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


def _set_ids(calls: Sequence[ToolCall], ids: Sequence[str]) -> None:
    for call, own in zip(calls, ids, strict=True):
        call.id = own
