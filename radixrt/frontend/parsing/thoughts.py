"""Reasoning formats: thoughts between two marks before the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from radixrt.frontend.parsing.formats import sequence, tag
from radixrt.frontend.parsing.pieces import Sink
from radixrt.frontend.parsing.reader import Reader, Steps, marks

Thinking = Literal["no", "may", "open"]
"""Whether an answer cannot begin with thoughts ("no"), may, or begins inside of them because its prompt has opened them
("open")."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around thoughts. A prompt that opens them may have `inside` after the first mark."""

    open: str
    close: str
    inside: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        return self.open, self.close

    def after(self, prompt: str) -> Thinking:
        """How an answer begins after a prompt with this end."""
        prompt = prompt.rstrip()
        if self.inside:
            prompt = prompt.removesuffix(self.inside).rstrip()
        return "open" if prompt.endswith(self.open) else "no" if prompt.endswith(self.close) else "may"

    def read(self, reader: Reader, sink: Sink, thinking: Thinking, hidden: frozenset[str]) -> Steps[None]:
        """Read the thoughts at the beginning of an answer, if there are any."""
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
        """A structural tag's format for `answer`, preceded by thoughts that are allowed or required."""
        if thinking == "no":
            return answer
        begin = "" if thinking == "open" else self.open
        line_feeds = {"type": "regex", "pattern": "\\n*"}
        thoughts = tag(begin, {"type": "any_text"}, self.close)
        if thinking == "open":
            return sequence(sequence(thoughts, line_feeds), answer)
        # GLM-4.5 begins its answers with a line feed.
        return sequence({"type": "optional", "content": sequence(line_feeds, thoughts, line_feeds)}, answer)


def _line_feeds(reader: Reader) -> Steps[None]:
    """Skip line feeds that the format puts next to its marks."""
    while (yield from reader.take("\n")):
        pass
