"""Calls as Qwen3-Coder writes them, each argument between tags:

    <tool_call>
    <function=f>
    <parameter=a>
    the value; a string is written without quotes, other types as JSON
    </parameter>
    </function>
    </tool_call>

Seed-OSS writes the same between <seed:tool_call> and </seed:tool_call>, with values on the same line as their tags.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from radixrt.frontend.parsing.formats import Function, Functions, in_text, one_after_another, tag
from radixrt.frontend.parsing.pieces import Sink
from radixrt.frontend.parsing.reader import Reader, Steps, marks
from radixrt.frontend.parsing.tagged import Tags, content_of, read_arguments

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
_NAME = re.compile(r"[^<>\s]")
SEED = "<seed:tool_call>", "</seed:tool_call>"
ARGUMENT = Tags("<parameter=", (">",), "</parameter>", _NAME, lines=True)


class QwenCoder:
    """See `formats.ToolFormat`. `marks` are those around a call; `lines`: whether values are on lines of their own."""

    def __init__(self, marks: tuple[str, str] = (OPEN, CLOSE), lines: bool = True) -> None:
        self.marks: tuple[str, ...] = marks
        self._open, self._close = marks
        self._argument = replace(ARGUMENT, lines=lines)

    def new_id(self) -> str:
        return "call_" + uuid.uuid4().hex[:24]

    # ------------------------------------------------------------ reading

    def read(self, reader: Reader, sink: Sink, functions: Functions, hidden: frozenset[str]) -> Steps[None]:
        begins = marks((self._open, FUNCTION), hidden)  # the model sometimes omits the first tag
        mark = yield from reader.until(begins, sink.content)
        while mark:
            start = reader.at
            if mark == self._open:
                yield from reader.space()
            opened = mark == FUNCTION or (yield from reader.take(FUNCTION))
            if not opened or not (yield from self._call(reader, sink, functions)):
                reader.at = start
                sink.content("" if mark in hidden else mark)
            mark = yield from reader.until(begins, sink.content)

    def _call(self, reader: Reader, sink: Sink, functions: Functions) -> Steps[bool]:
        """Read a call after FUNCTION to its end. Returns whether it is a call."""
        name = yield from reader.word(_NAME)
        if not name or not (yield from reader.take(">")):
            return False
        sink.call(name)
        yield from read_arguments(reader, sink, functions.get(name, {}), self._argument, FUNCTION_END)
        yield from reader.space()
        if not (yield from reader.take(self._close)):
            reader.ends_within((self._close,))
        sink.bound()
        return True

    # ------------------------------------------------------------ writing

    def forced(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        return one_after_another([self._tag(function) for function in functions], "\n", parallel)

    def free(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        return in_text([self._open], [self._tag(function) for function in functions], parallel)

    def _tag(self, function: Function) -> dict[str, Any]:
        begin = f"{self._open}\n{FUNCTION}{function.name}>\n"
        return tag(begin, content_of(function, "qwen_xml"), f"{FUNCTION_END}\n{self._close}")
