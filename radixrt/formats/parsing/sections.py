"""Calls in a section, as DeepSeek's models and Kimi K2 write them. DeepSeek V3.1, on one line:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3 and R1 write `function` in place of f, and after the separator f and the arguments in a Markdown code block. Kimi K2:

    <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|> ...
"""

from __future__ import annotations

import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from radixrt.formats.parsing.calls import begins_object
from radixrt.formats.parsing.formats import Function, Functions, in_text, json_schema, one_after_another, sequence, tag
from radixrt.formats.parsing.pieces import Sink
from radixrt.formats.parsing.reader import Reader, Steps, marks
from radixrt.formats.parsing.writing import Json

_WORD = re.compile(r"[^\s<]")
_KIMI_ID = re.compile(r"(?:functions\.)?(.+?)(?::[0-9]+)?")
FENCE, FENCE_END = "```json", "```"


class _Sections(Json, ABC):
    """The common part of both families. `section`, `call`, `separator`, and their ends, are a family's marks."""

    section: str
    call: str
    separator: str
    call_end: str
    section_end: str
    between = ""

    @property
    def marks(self) -> tuple[str, ...]:
        return self.section, self.call, self.separator, self.call_end, self.section_end

    def new_id(self) -> str:
        return "call_" + uuid.uuid4().hex[:24]

    def begins(self, functions: Functions) -> tuple[str, ...]:
        return (self.section, self.call)

    # ------------------------------------------------------------ reading

    def read(self, reader: Reader, sink: Sink, functions: Functions, hidden: frozenset[str]) -> Steps[None]:
        begins = marks(self.begins(functions), hidden)
        while mark := (yield from reader.until(begins, sink.content)):
            start = reader.at
            if mark == self.section:
                yield from self._to_call(reader)
            if (mark == self.call or (yield from reader.take(self.call))) and (yield from self._call(reader, sink)):
                yield from self._after(reader, sink, hidden)
            else:
                reader.at = start
                sink.content("" if mark in hidden else mark)

    def _after(self, reader: Reader, sink: Sink, hidden: frozenset[str]) -> Steps[None]:
        """Read the rest of a call, and the calls after it."""
        ends = marks((self.call_end, self.section_end), hidden)
        while True:
            yield from reader.space()
            yield from reader.take(FENCE_END)
            mark = yield from reader.until(ends, sink.content)
            sink.bound()
            start = reader.at
            if not mark or mark == self.section_end:
                return
            yield from self._to_call(reader)
            if (yield from reader.take(self.section_end)):
                return
            if not ((yield from reader.take(self.call)) and (yield from self._call(reader, sink))):
                reader.at = start
                return

    def _to_call(self, reader: Reader) -> Steps[None]:
        """Skip white space, and text before a mark of the section, which some models write within."""
        yield from reader.space()
        mark, place = yield from reader.ahead(marks((self.call, self.section, self.section_end)), reader.at)
        if mark in (self.call, self.section_end):
            reader.at = place

    @abstractmethod
    def _call(self, reader: Reader, sink: Sink) -> Steps[bool]:
        """Read a call after its mark, up to the end of its arguments. Returns whether it is a call."""

    # ------------------------------------------------------------ writing

    def forced(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        calls = one_after_another([self._tag(function) for function in functions], self.between, parallel)
        return tag(self.section, calls, self.section_end)

    def free(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        section = self.forced(functions, parallel)
        return in_text([self.section], [section], several=False)

    @abstractmethod
    def _tag(self, function: Function) -> dict[str, Any]:
        """A structural tag's format for one call of a function."""


class DeepSeek(_Sections):
    """See `formats.ToolFormat`. Both forms are parsed; `fenced`: whether the older one, with a code block, is to be
    written."""

    section, section_end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    call, separator, call_end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

    def __init__(self, fenced: bool = False) -> None:
        self._fenced = fenced
        self.between = "\n" if fenced else ""

    def _call(self, reader: Reader, sink: Sink) -> Steps[bool]:
        name = yield from reader.word(_WORD)
        if not name or not (yield from reader.take(self.separator)):
            return False
        yield from reader.space()
        if not (yield from begins_object(reader)):
            name = yield from reader.word(_WORD)
            yield from reader.space()
            yield from reader.take(FENCE)
            yield from reader.space()
            if not name or not (yield from begins_object(reader)):
                return False
        sink.call(name)
        yield from reader.nested(sink.arguments)
        return True

    def _tag(self, function: Function) -> dict[str, Any]:
        schema = json_schema(function.schema)
        if not self._fenced:
            return tag(f"{self.call}{function.name}{self.separator}", schema, self.call_end)
        begin = f"{self.call}function{self.separator}{function.name}\n{FENCE}\n"
        return tag(begin, schema, f"\n{FENCE_END}{self.call_end}")


class Kimi(_Sections):
    """See `formats.ToolFormat`. A call's id is the one that the model wrote: it contains the function's name, and the
    template needs it."""

    section, section_end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    call, separator, call_end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

    def _call(self, reader: Reader, sink: Sink) -> Steps[bool]:
        yield from reader.space()
        id = yield from reader.word(_WORD)
        yield from reader.space()
        if not id or not (yield from reader.take(self.separator)):
            return False
        yield from reader.space()
        if not (yield from begins_object(reader)):
            return False
        name = _KIMI_ID.fullmatch(id)
        sink.call(name[1] if name else id, id)
        yield from reader.nested(sink.arguments)
        return True

    def _tag(self, function: Function) -> dict[str, Any]:
        number = {"type": "regex", "pattern": "[0-9]{1,4}"}
        arguments = {"type": "const_string", "value": self.separator}, json_schema(function.schema)
        return tag(f"{self.call}functions.{function.name}:", sequence(number, *arguments), self.call_end)
