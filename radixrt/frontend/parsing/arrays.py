"""Calls in an array of JSON behind a mark, [{"name": "f", "arguments": {...}}, ...]:

Granite 3           <|tool_call|>[...]
Phi-4-mini          <|tool_call|>[...]<|/tool_call|>
Nemotron            <TOOLCALL>[...]</TOOLCALL>
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from radixrt.frontend.parsing.calls import read_call
from radixrt.frontend.parsing.formats import Function, Functions, in_text, json_schema, one_after_another, tag
from radixrt.frontend.parsing.pieces import Sink
from radixrt.frontend.parsing.reader import Reader, Steps, marks

GRANITE = ("<|tool_call|>", "")
PHI = ("<|tool_call|>", "<|/tool_call|>")
NEMOTRON = ("<TOOLCALL>", "</TOOLCALL>")


class Array:
    """See `formats.ToolFormat`. `marks` are those before and after an array; the second may be "". A single call
    without an array is accepted as well."""

    def __init__(self, marks: tuple[str, str]) -> None:
        self._open, self._close = marks
        self.marks: tuple[str, ...] = tuple(filter(None, marks))

    def new_id(self) -> str:
        return "call_" + uuid.uuid4().hex[:24]

    def begins(self, functions: Functions) -> tuple[str, ...]:
        return (self._open,)

    def read(self, reader: Reader, sink: Sink, functions: Functions, hidden: frozenset[str]) -> Steps[None]:
        begins = marks((self._open,), hidden)
        while mark := (yield from reader.until(begins, sink.content)):
            start = reader.at
            yield from reader.space()
            found = yield from (read_array if (yield from reader.take("[")) else read_call)(reader, sink)
            if found:
                yield from self._end(reader)
            else:
                reader.at = start
                sink.content("" if mark in hidden else mark)

    def _end(self, reader: Reader) -> Steps[None]:
        """Read the mark that ends the array, if there is one and it comes next."""
        if not self._close:
            return
        start = reader.at
        yield from reader.space()
        if not (yield from reader.take(self._close)) and not reader.ends_within((self._close,)):
            reader.at = start

    def forced(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        calls = one_after_another([call_tag(function) for function in functions], ", ", parallel)
        return tag(f"{self._open}[", calls, f"]{self._close}")

    def free(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        array = self.forced(functions, parallel)
        return in_text([self._open], [array], several=False)


def read_array(reader: Reader, sink: Sink) -> Steps[bool]:
    """Read the calls of an array after its opening bracket, as far as they are calls, and its end. False if there is
    none."""
    start, found = reader.at, False
    while True:
        yield from reader.space()
        if not (yield from read_call(reader, sink)):
            reader.at = start
            return found
        found, start = True, reader.at
        yield from reader.space()
        if (yield from reader.take("]")):
            return True
        yield from reader.take(",")


def call_tag(function: Function) -> dict[str, Any]:
    """A structural tag's format for one call of a function."""
    begin = f'{{"name": {json.dumps(function.name, ensure_ascii=False)}, "arguments": '
    return tag(begin, json_schema(function.schema), "}")
