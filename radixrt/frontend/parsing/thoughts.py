"""Reasoning: what a model thinks, between two marks, before it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from radixrt.frontend.parsing.formats import sequence, tag
from radixrt.frontend.parsing.pieces import Sink
from radixrt.frontend.parsing.reader import Reader, Steps, marks

Thinking = Literal["no", "may", "open"]
"""Whether an answer cannot begin with thoughts, may, or begins inside of them, which its prompt has opened."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    open: str
    close: str

    @property
    def marks(self) -> tuple[str, ...]:
        return self.open, self.close

    def after(self, prompt: str) -> Thinking:
        """How an answer to a prompt that ends so begins."""
        prompt = prompt.rstrip()
        return "open" if prompt.endswith(self.open) else "no" if prompt.endswith(self.close) else "may"

    def read(self, reader: Reader, sink: Sink, thinking: Thinking, hidden: frozenset[str]) -> Steps[None]:
        """Read the thoughts an answer begins with, if it does."""
        if thinking == "may":
            start = reader.at
            yield from reader.space()
            if not (yield from reader.take(self.open)):
                reader.at = start
                return
        yield from _line_feeds(reader)
        if (yield from reader.until(marks((self.close,), hidden), sink.reasoning)):
            sink.bound()
            yield from _line_feeds(reader)

    def before(self, thinking: Thinking, answer: dict[str, Any]) -> dict[str, Any]:
        """A structural tag's format: `answer`, and what may or must come before it."""
        if thinking == "no":
            return answer
        begin = "" if thinking == "open" else self.open
        line_feeds = {"type": "regex", "pattern": "\\n*"}
        thoughts = sequence(tag(begin, {"type": "any_text"}, self.close), line_feeds)
        return sequence(thoughts if thinking == "open" else {"type": "optional", "content": thoughts}, answer)


def _line_feeds(reader: Reader) -> Steps[None]:
    """Skip those that the format puts beside its marks."""
    while (yield from reader.take("\n")):
        pass
