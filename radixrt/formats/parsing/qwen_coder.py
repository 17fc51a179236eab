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

from radixrt.formats.parsing.formats import Function, Functions, in_text, one_after_another, tag
from radixrt.formats.parsing.pieces import Sink
from radixrt.formats.parsing.reader import Reader, Steps, marks
from radixrt.formats.parsing.tagged import Tags, Written, begins, read_arguments, read_closes

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
_NAME = re.compile(r"[^<>\s]")
SEED = "<seed:tool_call>", "</seed:tool_call>"
ARGUMENT = Tags(
    "<parameter=", (">",), "</parameter>", ("</param", "<param"), ("</function", "</tool_call"), FUNCTION, (">",),
    _NAME, lines=True,
)  # fmt: skip


class QwenCoder:
    """See `formats.ToolFormat`. `marks` are those around a call; `lines`: whether values are on lines of their own."""

    def __init__(self, marks: tuple[str, str] = (OPEN, CLOSE), lines: bool = True) -> None:
        self.marks: tuple[str, ...] = marks
        self._open, self._close = marks
        closes = ARGUMENT.closes[0], self._close.removesuffix(">")
        self._argument = replace(ARGUMENT, closes=closes, lines=lines)
        end = "\n" * lines
        self.arguments = Written(ARGUMENT.begin, f">{end}", f"{end}{ARGUMENT.end}\n", _NAME).arguments

    def new_id(self) -> str:
        return "call_" + uuid.uuid4().hex[:24]

    def begins(self, functions: Functions) -> tuple[str, ...]:
        return (self._open, FUNCTION)

    # ------------------------------------------------------------ reading

    def read(self, reader: Reader, sink: Sink, functions: Functions, hidden: frozenset[str]) -> Steps[None]:
        calls = marks(self.begins(functions), hidden)
        while mark := (yield from reader.until(calls, sink.content)):
            start = reader.at
            if mark == self._open:
                yield from reader.space()
            bare = mark == FUNCTION  # the model sometimes omits the first tag
            if not (bare or (yield from reader.take(FUNCTION))) or not (
                yield from self._call(reader, sink, functions, bare)
            ):
                reader.at = start
                sink.content("" if mark in hidden else mark)

    def _call(self, reader: Reader, sink: Sink, functions: Functions, bare: bool) -> Steps[bool]:
        """Read a call after FUNCTION to its end. Returns whether it is a call: a `bare` one may be in a text about
        calls, and is one only of a known function."""
        name = yield from reader.word(_NAME)
        if not name or (bare and name not in functions) or not (yield from reader.take(">")):
            return False
        if not (yield from begins(reader, self._argument)) or (bare and not (yield from reader.peek())):
            return False
        sink.call(name)
        yield from read_arguments(reader, sink, functions.get(name, {}), self._argument)
        yield from read_closes(reader, self._argument.closes, found=True)
        sink.bound()
        return True

    # ------------------------------------------------------------ writing

    def forced(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        return one_after_another([self._tag(function) for function in functions], "\n", parallel)

    def free(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        return in_text([self._open], [self._tag(function) for function in functions], parallel)

    def _tag(self, function: Function) -> dict[str, Any]:
        begin = f"{self._open}\n{FUNCTION}{function.name}>\n"
        return tag(begin, self.arguments(function.schema), f"{FUNCTION_END}\n{self._close}")
