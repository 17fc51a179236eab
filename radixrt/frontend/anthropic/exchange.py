"""One request of Anthropic's API in flight."""

from __future__ import annotations

from typing import Any

from radixrt.formats.output import TEXT, Output
from radixrt.formats.parsing import Piece
from radixrt.frontend.anthropic.replies import MessageReply, event
from radixrt.frontend.generate.choice import Choice
from radixrt.frontend.generate.exchange import Exchange, OnAnswer
from radixrt.frontend.http.anthropic_errors import AnthropicError
from radixrt.frontend.http.errors import ApiError
from radixrt.messages import TOKEN_BYTES, Generate, TokenLogprob, TokenPrompt

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageExchange(Exchange[MessageReply]):
    """The single choice of a message, in blocks. An error after the stream has begun is sent as an event. `max_tokens`
    is the requested one, which may be more than there is room for."""

    def __init__(self, *args: Any, max_tokens: int) -> None:
        super().__init__(*args)
        self._max_tokens = max_tokens

    def submit(
        self, request: Generate, echo: str | None = None, output: Output = TEXT, on_answer: OnAnswer | None = None
    ) -> None:
        assert isinstance(request.prompt, TokenPrompt)
        self.reply.breakpoints = request.pin
        self.reply.prompt_tokens = len(request.prompt.ids) // TOKEN_BYTES
        super().submit(request, echo, output, on_answer)

    def own_error(self, problem: ApiError) -> AnthropicError:
        return AnthropicError.wrap(problem)

    def error_event(self, problem: ApiError) -> bytes:
        return event(AnthropicError.wrap(problem).data())

    def _add(self, choice: Choice, pieces: list[Piece], logprobs: list[TokenLogprob] | None, last: bool) -> None:
        events = [one for piece in pieces for one in self.reply.add(piece)]
        if self._streams and events:
            self.put(b"".join(map(event, events)))
        self.wake()

    def _end(self) -> None:
        if self._streams:
            self.put(self.reply.end(*self._how_it_ended(), self.choices[0].usage, self.reasoning_tokens))
        self.finished = True
        self.wake()

    def whole(self) -> bytes:
        return self.reply.body(*self._how_it_ended(), self.choices[0].usage, self.reasoning_tokens)

    def _how_it_ended(self) -> tuple[str, str | None]:
        """Returns (stop_reason, stop_sequence)."""
        choice = self.choices[0]
        if isinstance(choice.stop, str):
            return "stop_sequence", choice.stop
        full = choice.finish == "length" and choice.usage.completion_tokens < self._max_tokens
        return "model_context_window_exceeded" if full else _STOP_REASONS.get(choice.finish, "end_turn"), None
