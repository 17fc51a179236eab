"""Reasoning formats: thoughts between two marks before the answer."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from radixrt.formats.parsing.formats import Functions, ToolFormat, sequence, tag
from radixrt.formats.parsing.pieces import Sink
from radixrt.formats.parsing.reader import Reader, Steps, marks

Thinking = Literal["no", "may", "open"]
"""Whether an answer cannot begin with thoughts ("no"), may, or begins inside of them because its prompt has opened them
("open")."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around thoughts, and what is always behind the first one (`title`). A prompt that opens thoughts may
    have `inside` after that."""

    open: str
    close: str
    inside: str = ""
    title: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        return self.open, self.close

    def after(self, prompt: str) -> Thinking:
        """How an answer begins after a prompt with this end."""
        prompt = prompt.rstrip()
        if self.inside:
            prompt = prompt.removesuffix(self.inside).rstrip()
        return "open" if prompt.endswith(self.open + self.title) else "no" if prompt.endswith(self.close) else "may"

    def read(
        self,
        reader: Reader,
        sink: Sink,
        thinking: Thinking,
        hidden: frozenset[str],
        tools: ToolFormat | None = None,
        functions: Functions = MappingProxyType({}),
    ) -> Steps[None]:
        """Read the thoughts at the beginning of an answer, if there are any: up to the mark that closes them or, if
        none does, to a call of one of `functions`, which models begin without closing their thoughts."""
        if thinking == "may":
            start = reader.at
            yield from reader.space()
            if not (yield from reader.take(self.open + self.title)):
                reader.at = start
                return
        yield from _line_feeds(reader)
        begins = tools.begins(functions) if tools is not None and functions else ()
        hidden = frozenset(mark for mark in hidden if not any(mark in begin for begin in begins) or mark in begins)
        while mark := (yield from reader.until(marks((self.close, *begins), hidden), sink.reasoning)):
            if mark == self.close:
                sink.bound()
                yield from _line_feeds(reader)
                return
            assert tools is not None
            start, after = reader.at - len(mark), reader.at
            if not (yield from _is_call(reader, start, tools, functions, hidden)):
                reader.at = after
                sink.reasoning("" if mark in hidden else mark)
                continue
            # Held back until it is certain: thoughts that are closed later only mention it.
            closed, _ = yield from reader.ahead(marks((self.close,)), after)
            reader.at = start
            if not closed:
                sink.bound()
                return
            begins = ()

    def before(self, thinking: Thinking, answer: dict[str, Any]) -> dict[str, Any]:
        """A structural tag's format for `answer`, preceded by thoughts that are allowed or required."""
        if thinking == "no":
            return answer
        begin = "" if thinking == "open" else self.open + self.title
        line_feeds = {"type": "regex", "pattern": "\\n*"}
        thoughts = tag(begin, {"type": "any_text"}, self.close)
        if thinking == "open":
            return sequence(sequence(thoughts, line_feeds), answer)
        # GLM-4.5 begins its answers with a line feed.
        return sequence({"type": "optional", "content": sequence(line_feeds, thoughts, line_feeds)}, answer)


class _Decided(Exception):
    """It is known whether a call begins."""

    def __init__(self, known: bool) -> None:
        self.known = known


class _Probe(Sink):
    """Ends the reading of what may be a call, from `start`, where that is decided."""

    def __init__(self, reader: Reader, functions: Functions) -> None:
        super().__init__(str)
        self._reader, self._start, self._functions = reader, reader.at, functions

    def call(self, name: str, id: str = "") -> None:
        raise _Decided(name in self._functions)

    def content(self, text: str) -> None:
        if text or self._reader.at > self._start:
            raise _Decided(False)


def _is_call(
    reader: Reader, start: int, tools: ToolFormat, functions: Functions, hidden: frozenset[str]
) -> Steps[bool]:  # fmt: skip
    """Whether a call of one of `functions` begins at `start`. No text is passed on; `reader.at` is anywhere after."""
    reader.at = start
    try:
        yield from tools.read(reader, _Probe(reader, functions), functions, hidden)
    except _Decided as decided:
        return decided.known
    return False


def _line_feeds(reader: Reader) -> Steps[None]:
    """Skip line feeds that the format puts next to its marks."""
    while (yield from reader.take("\n")):
        pass
