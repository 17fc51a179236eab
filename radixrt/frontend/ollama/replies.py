"""Formats an answer as Ollama's JSON: whole, or in lines. Pure, but for the clock."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from radixrt.formats.message import AssistantMessage, ToolCall
from radixrt.formats.parsing import CallStart, Content, Piece, Reasoning
from radixrt.frontend.generate.arguments import arguments_object
from radixrt.frontend.generate.reply import BaseReply
from radixrt.frontend.http.codec import encode
from radixrt.messages import Usage
from radixrt.tokens import Tokenizer


def head(model: str) -> dict[str, Any]:
    """The fields that each line begins with."""
    return {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


class OllamaReply(BaseReply, ABC):
    """Formats the answer to a request that has come at `started` (perf_counter_ns). A call is told when it is
    complete."""

    content_type = b"application/x-ndjson"

    def __init__(self, model: str, tokenizer: Tokenizer | None, started: int) -> None:
        super().__init__(model, tokenizer)
        self.id = uuid.uuid4().hex
        self._started = started
        self._first = 0
        self._begun = 0
        """The number of calls that have begun."""
        self._told = 0
        """The number of calls in lines."""

    @staticmethod
    @abstractmethod
    def told(content: str = "", thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """The fields of a line, or of a whole answer, that hold the text."""

    def arrived(self) -> None:
        """Tokens have come, which end the computation of the prompt if they are the first."""
        self._first = self._first or time.perf_counter_ns()

    # ------------------------------------------------------------ lines

    def lines(self, message: AssistantMessage, pieces: list[Piece], last: bool) -> bytes:
        """The lines of new pieces, which are in the message already; with all of its calls after the `last` one."""
        found: list[dict[str, Any]] = []
        for piece in pieces:
            match piece:
                case CallStart(index=index):
                    found += self._calls(message)
                    self._begun = index + 1
                case Content(text=text):
                    found += [*self._calls(message), self.told(text)]
                case Reasoning(text=text):
                    found += [*self._calls(message), self.told(thinking=text)]
        if last:
            found += self._calls(message)
        return b"".join(self._line(one | {"done": False}) for one in found)

    def last_line(self, finish: str, usage: Usage) -> bytes:
        return self._line(self.told() | self._end(finish, usage))

    def _calls(self, message: AssistantMessage) -> list[dict[str, Any]]:
        """The fields of a line with the calls that are complete and in none yet, if there are any."""
        calls = [call_json(i, message.calls[i]) for i in range(self._told, self._begun)]
        self._told = self._begun
        return [self.told(calls=calls)] if calls else []

    def _line(self, fields: dict[str, Any]) -> bytes:
        return encode(head(self.model) | fields) + b"\n"

    # ------------------------------------------------------------ whole

    def whole(self, message: AssistantMessage, finish: str, usage: Usage) -> bytes:
        calls = [call_json(i, call) for i, call in enumerate(message.calls)]
        told = self.told(message.content, message.reasoning, calls)
        return encode(head(self.model) | told | self._end(finish, usage))

    def _end(self, finish: str, usage: Usage) -> dict[str, Any]:
        """How the answer ended. When its first token came is known of streams only."""
        now = time.perf_counter_ns()
        end: dict[str, Any] = {"done": True, "done_reason": "length" if finish == "length" else "stop"}
        end |= {"total_duration": now - self._started, "load_duration": 0}
        end |= {"prompt_eval_count": usage.prompt_tokens, "prompt_eval_cached_count": usage.cached_tokens}
        if self._first:
            end |= {"prompt_eval_duration": self._first - self._started, "eval_duration": now - self._first}
        return end | {"eval_count": usage.completion_tokens, "radixrt": self.about(usage)}


class ChatReply(OllamaReply):
    """An OllamaReply for /api/chat."""

    @staticmethod
    def told(content: str = "", thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        more = {"thinking": thinking, "tool_calls": calls}
        found = {name: value for name, value in more.items() if value}
        return {"message": {"role": "assistant", "content": content} | found}


class GenerateReply(OllamaReply):
    """An OllamaReply for /api/generate, which has no calls."""

    @staticmethod
    def told(content: str = "", thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        return {"response": content} | ({"thinking": thinking} if thinking else {})


def call_json(index: int, call: ToolCall) -> dict[str, Any]:
    function = {"index": index, "name": call.name, "arguments": arguments_object(call.arguments)}
    return {"id": call.id, "function": function}
