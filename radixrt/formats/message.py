"""An assistant's message, built from pieces as it is generated."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from radixrt import messages
from radixrt.formats.parsing import CallArguments, CallStart, Content, Piece
from radixrt.messages import ChatMessage


class ToolCall:
    """A tool call. `arguments` is the model's text, usually JSON."""

    __slots__ = ("_arguments", "id", "name")

    def __init__(self, id: str, name: str) -> None:
        self.id = id
        self.name = name
        self._arguments: list[str] = []

    @property
    def arguments(self) -> str:
        return "".join(self._arguments)

    def add(self, text: str) -> None:
        self._arguments.append(text)


class AssistantMessage:
    """The message of one choice, independent of the API."""

    __slots__ = ("_begins", "_content", "_reasoning", "calls")

    def __init__(self) -> None:
        self.calls: list[ToolCall] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._begins: dict[tuple[int, int], int] = {}
        """Where parts of the reasoning begin in it, by the amount of other output before each."""

    def add(self, piece: Piece) -> None:
        if isinstance(piece, Content):
            self._content.append(piece.text)
        elif isinstance(piece, CallArguments):
            self.calls[piece.index].add(piece.text)
        elif isinstance(piece, CallStart):
            self.calls.append(ToolCall(piece.id, piece.name))
        else:
            self._begins.setdefault((len(self._content), len(self.calls)), len(self._reasoning))
            self._reasoning.append(piece.text)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def has_thoughts(self) -> bool:
        return bool(self._reasoning)

    @property
    def thoughts(self) -> list[str]:
        """Its reasoning, in parts that are separated by other output."""
        begins = [*self._begins.values(), None]
        return ["".join(self._reasoning[begin:end]) for begin, end in pairwise(begins)]

    @property
    def cut(self) -> bool:
        """Whether the arguments of its last call are incomplete."""
        try:
            json.loads(self.calls[-1].arguments)
        except (ValueError, RecursionError):
            return True
        return False

    def to_openai(self) -> dict[str, Any]:
        """The message in OpenAI's format, as in answers and in the history of the next request."""
        return self.whole().to_openai()

    def whole(self) -> ChatMessage:
        """The message as it is sent to clients of the router."""
        calls = [messages.ToolCall(call.id, call.name, call.arguments) for call in self.calls]
        return ChatMessage(self.content, self.reasoning, calls)
