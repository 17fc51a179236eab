"""The parser of one answer."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from radixrt.formats.parsing.formats import Functions, ToolFormat
from radixrt.formats.parsing.pieces import Content, Piece, Sink
from radixrt.formats.parsing.reader import Reader, Steps, marks
from radixrt.formats.parsing.thoughts import ReasoningFormat, Thinking


class OutputParser:
    """Text goes in as it arrives, and pieces come out. The result depends on the whole text only, not on its parts.

    No text is lost and nothing raises: text that turns out to be no call is content. `hidden` are marks that are
    special tokens, which never become content. With `most_calls` the answer ends where one more call begins
    (`full`)."""

    def __init__(
        self,
        tools: ToolFormat | None,
        functions: Functions = MappingProxyType({}),
        reasoning: ReasoningFormat | None = None,
        thinking: Thinking = "no",
        hidden: frozenset[str] = frozenset(),
        most_calls: int | None = None,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        self._reader = Reader()
        self._sink = Sink(new_id or (tools.new_id if tools else str), most_calls)
        self._steps = self._read(tools, functions, reasoning, thinking, hidden)
        self.idle = False
        """Whether all further text is content."""
        self._advance()

    def _read(
        self,
        tools: ToolFormat | None,
        functions: Functions,
        reasoning: ReasoningFormat | None,
        thinking: Thinking,
        hidden: frozenset[str],
    ) -> Steps[None]:
        if reasoning is not None and thinking != "no":
            yield from reasoning.read(self._reader, self._sink, thinking, hidden, tools, functions)
        if tools is not None:
            yield from tools.read(self._reader, self._sink, functions, hidden)
        elif hidden:
            yield from self._reader.until(marks((), hidden), self._sink.content)

    @property
    def full(self) -> bool:
        return self._sink.full

    def push(self, text: str) -> list[Piece]:
        """Add text; returns the new pieces."""
        if self.idle:
            return [Content(text)] if text else []
        if not text:
            return []
        self._reader.feed(text)
        return self._advance()

    def finish(self) -> list[Piece]:
        """End the text; returns the rest of the pieces."""
        self._reader.ended = True
        pieces = self._advance() if not self.idle else []
        self._sink.finish()
        return pieces + self._sink.take()

    def _advance(self) -> list[Piece]:
        try:
            next(self._steps)
        except StopIteration:
            self.idle = True
        pieces = self._sink.take()
        if self.idle and (rest := self._reader.rest()):
            pieces.append(Content(rest))
        return pieces
