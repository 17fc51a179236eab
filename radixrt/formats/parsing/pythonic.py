"""Calls as Llama 3.2 and 4 write them, a list in Python syntax, at the start of the answer or behind <|python_start|>:

    [f(a="text", b=[1, 2]), g()]

and as LFM2 does, between <|tool_call_start|> and <|tool_call_end|>.

A call is read by `python_calls`.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from typing import Any

from radixrt.formats.parsing.arrays import read_array
from radixrt.formats.parsing.formats import (
    Function,
    Functions,
    constant,
    either,
    in_text,
    one_after_another,
    sequence,
    tag,
)
from radixrt.formats.parsing.pieces import Sink
from radixrt.formats.parsing.python_calls import Python, read_call
from radixrt.formats.parsing.reader import Reader, Steps, marks

START, END = "<|python_start|>", "<|python_end|>"
LFM2 = "<|tool_call_start|>", "<|tool_call_end|>"
STARTS, ENDS = (START, LFM2[0]), (END, LFM2[1])


class Pythonic(Python):
    """See `formats.ToolFormat`. Lists between all marks are parsed; `around`: those that are to be written."""

    marks = (*STARTS, *ENDS)

    def __init__(self, around: tuple[str, str] = ("", "")) -> None:
        self._open, self._close = around

    def new_id(self) -> str:
        return "call_" + uuid.uuid4().hex[:24]

    def begins(self, functions: Functions) -> tuple[str, ...]:
        return (*STARTS, *(f"[{name}(" for name in functions))

    # ------------------------------------------------------------ reading

    def read(self, reader: Reader, sink: Sink, functions: Functions, hidden: frozenset[str]) -> Steps[None]:
        begins = marks(STARTS, hidden)
        # A bare list may be content: it has calls only if the first one is of a known function.
        yield from self._list(reader, sink, functions, functions)
        while mark := (yield from reader.until(begins, sink.content)):
            if not (yield from self._list(reader, sink, functions, None)) and not (yield from _json(reader, sink)):
                sink.content("" if mark in hidden else mark)

    def _list(
        self, reader: Reader, sink: Sink, functions: Functions, known: Collection[str] | None
    ) -> Steps[bool]:  # fmt: skip
        """Read the list of calls that comes next. Returns False, and reads nothing, if there is none."""
        start = reader.at
        yield from reader.space()
        if not (yield from reader.take("[")) or not (yield from read_call(reader, sink, functions, known)):
            reader.at = start
            return False
        yield from reader.space()
        while (yield from reader.take(",")) and (yield from read_call(reader, sink, functions)):
            yield from reader.space()
        if (yield from reader.take("]")):
            yield from _end(reader)
        return True

    # ------------------------------------------------------------ writing

    def forced(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        calls = one_after_another([self.call_tag(function) for function in functions], ", ", parallel)
        return tag(f"{self._open}[", calls, f"]{self._close}")

    def free(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        """A list begins with the name of a function, since any text may have brackets."""
        if self._open:
            return in_text([self._open], [self.forced(functions, parallel)], several=False)
        more = sequence(constant(", "), either(*map(self.call_tag, functions)))
        end = [constant(")"), *([{"type": "star", "content": more}] if parallel else [])]
        tags = [tag(f"[{f.name}(", sequence(self.arguments(f.schema), *end), "]") for f in functions]
        return in_text([f"[{f.name}(" for f in functions], tags, several=False)


def _json(reader: Reader, sink: Sink) -> Steps[bool]:
    """Read the list of calls in JSON that comes next, as LFM2 writes it if it is told to."""
    start = reader.at
    yield from reader.space()
    if (yield from reader.take("[")) and (yield from read_array(reader, sink)):
        yield from _end(reader)
        return True
    reader.at = start
    return False


def _end(reader: Reader) -> Steps[None]:
    """Read the mark after a list, if it comes next."""
    for end in ENDS:
        if (yield from reader.take(end)):
            return
    reader.ends_within(ENDS)
