"""Calls in an array of JSON behind a mark, [{"name": "f", "arguments": {...}}, ...]:

Granite 3           <|tool_call|>[...]
Phi-4-mini          <|tool_call|>[...]<|/tool_call|>
Nemotron            <TOOLCALL>[...]</TOOLCALL>
Hunyuan (A13B)      <tool_calls>[...]</tool_calls>
Apertus             <|tools_prefix|>[{"f": {...}}, ...]<|tools_suffix|>
Cohere (Command)    <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {...}}, ...]<|END_ACTION|>
                    and content as <|START_RESPONSE|>...<|END_RESPONSE|>
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from radixrt.formats.parsing.calls import begins_object, read_call
from radixrt.formats.parsing.formats import (
    Framed,
    Function,
    Functions,
    constant,
    either,
    in_text,
    json_schema,
    one_after_another,
    sequence,
    tag,
)
from radixrt.formats.parsing.pieces import Sink
from radixrt.formats.parsing.reader import Reader, Steps, marks
from radixrt.formats.parsing.writing import Json

GRANITE = ("<|tool_call|>", "")
PHI = ("<|tool_call|>", "<|/tool_call|>")
NEMOTRON = ("<TOOLCALL>", "</TOOLCALL>")
HUNYUAN = ("<tool_calls>", "</tool_calls>")
APERTUS = ("<|tools_prefix|>", "<|tools_suffix|>")
COHERE = ("<|START_ACTION|>", "<|END_ACTION|>")
RESPONSE = ("<|START_RESPONSE|>", "<|START_TEXT|>", "<|END_RESPONSE|>", "<|END_TEXT|>")
"""What Cohere's models write around content, by generation."""
Read = Callable[[Reader, Sink], Steps[bool]]


class Array(Json):
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
            array = yield from reader.take("[")
            if (yield from (read_array(reader, sink, self._call) if array else self._call(reader, sink))):
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

    def _call(self, reader: Reader, sink: Sink) -> Steps[bool]:
        """Read a call. Returns False if none comes next."""
        return (yield from read_call(reader, sink))

    def _tag(self, function: Function) -> dict[str, Any]:
        """A structural tag's format for one call of a function."""
        return call_tag(function)

    def forced(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        calls = one_after_another([self._tag(function) for function in functions], ", ", parallel)
        return tag(f"{self._open}[", calls, f"]{self._close}")

    def free(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        array = self.forced(functions, parallel)
        return in_text([self._open], [array], several=False)


class Apertus(Array):
    """See `formats.ToolFormat`."""

    def __init__(self) -> None:
        super().__init__(APERTUS)

    def _call(self, reader: Reader, sink: Sink) -> Steps[bool]:
        if not (yield from reader.take("{")):
            return False
        yield from reader.space()
        name = yield from reader.string()
        yield from reader.space()
        if not name or not (yield from reader.take(":")):
            return False
        yield from reader.space()
        if not (yield from begins_object(reader)):
            return False
        sink.call(name)
        yield from reader.nested(sink.arguments)
        yield from reader.space()
        yield from reader.take("}")
        return True

    def _tag(self, function: Function) -> dict[str, Any]:
        return tag(f"{{{json.dumps(function.name, ensure_ascii=False)}: ", json_schema(function.schema), "}")


class Cohere(Array, Framed):
    """See `formats.ToolFormat`."""

    def __init__(self) -> None:
        super().__init__(COHERE)
        self.marks = (*COHERE, *RESPONSE)

    def read(self, reader: Reader, sink: Sink, functions: Functions, hidden: frozenset[str]) -> Steps[None]:
        return (yield from super().read(reader, sink, functions, hidden | frozenset(RESPONSE)))

    def _tag(self, function: Function) -> dict[str, Any]:
        number = {"type": "regex", "pattern": "[0-9]{1,4}"}
        name = f'", "tool_name": {json.dumps(function.name, ensure_ascii=False)}, "parameters": '
        return tag('{"tool_call_id": "', sequence(number, constant(name), json_schema(function.schema)), "}")

    def with_text(self, text: dict[str, Any]) -> dict[str, Any]:
        responses = [tag(begin, text, end) for begin, end in zip(RESPONSE[:2], RESPONSE[2:], strict=True)]
        return either(*responses, text)


def read_array(reader: Reader, sink: Sink, read: Read = read_call) -> Steps[bool]:
    """Read the calls of an array after its opening bracket, as far as they are calls, and its end. False if there is
    none."""
    start, found = reader.at, False
    while True:
        yield from reader.space()
        if not (yield from read(reader, sink)):
            cut = found and not (yield from reader.peek())  # within the next call
            reader.at = reader.at if cut else start
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
