"""Calls as GLM-4.5 and 4.6 write them; 4.7 writes them without line feeds:

    <tool_call>f
    <arg_key>a</arg_key>
    <arg_value>the value; a string is written without quotes, other types as JSON</arg_value>
    </tool_call>

Values are taken literally, including line feeds.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from typing import Any

from radixrt.formats.parsing.formats import Function, Functions, in_text, one_after_another, tag
from radixrt.formats.parsing.pieces import Sink
from radixrt.formats.parsing.reader import Reader, Steps, marks
from radixrt.formats.parsing.tagged import Tags, Written, read_arguments

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
_NAME = re.compile(r"[^<>{\s]")
ARGUMENT = Tags(
    KEY, (VALUE,), VALUE_END, ("</arg", "<arg_val"), ("</tool_call",), OPEN, (KEY, CLOSE),
    re.compile(r"[^<>]"),
    name_end="</arg_key",
)  # fmt: skip


class Glm:
    """See `formats.ToolFormat`. Both forms are parsed; `lines`: whether that of 4.5 is to be written."""

    marks = (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)

    def __init__(self, lines: bool = True) -> None:
        self._line_end = end = "\n" if lines else ""
        self.arguments = Written(KEY, f"{KEY_END}{end}{VALUE}", f"{VALUE_END}{end}", ARGUMENT.name).arguments

    def new_id(self) -> str:
        return "call_" + uuid.uuid4().hex[:24]

    def begins(self, functions: Functions) -> tuple[str, ...]:
        return (OPEN,)

    # ------------------------------------------------------------ reading

    def read(self, reader: Reader, sink: Sink, functions: Functions, hidden: frozenset[str]) -> Steps[None]:
        begins = marks((OPEN,), hidden)
        while mark := (yield from reader.until(begins, sink.content)):
            start = reader.at
            if not (yield from self._call(reader, sink, functions)):
                reader.at = start
                sink.content("" if mark in hidden else mark)

    def _call(self, reader: Reader, sink: Sink, functions: Functions) -> Steps[bool]:
        """Read a call after OPEN to its end. Returns whether it is a call: it is if an argument begins, or it ends."""
        yield from reader.space()
        name = yield from reader.word(_NAME)
        yield from reader.space()
        start = reader.at
        if not name or not ((yield from reader.take(KEY)) or (yield from reader.take(CLOSE))):
            return False
        reader.at = start
        sink.call(name)
        yield from read_arguments(reader, sink, functions.get(name, {}), ARGUMENT)
        return True

    # ------------------------------------------------------------ writing

    def forced(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        return one_after_another([self._tag(function) for function in functions], self._line_end, parallel)

    def free(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        return in_text([OPEN], [self._tag(function) for function in functions], parallel)

    def _tag(self, function: Function) -> dict[str, Any]:
        return tag(f"{OPEN}{function.name}{self._line_end}", self.arguments(function.schema), CLOSE)
