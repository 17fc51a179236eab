"""Calls as Llama 3.1 writes them: {"name": "f", "parameters": {...}}, several separated by semicolons, at the start of
the answer or behind <|python_tag|>."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Sequence
from typing import Any

from radixrt.formats.parsing.calls import read_call
from radixrt.formats.parsing.formats import Function, Functions, in_text, json_schema, one_after_another, tag
from radixrt.formats.parsing.pieces import Sink
from radixrt.formats.parsing.reader import Reader, Steps, marks
from radixrt.formats.parsing.writing import Json

PYTHON = "<|python_tag|>"


class Llama(Json):
    """See `formats.ToolFormat`."""

    marks = (PYTHON,)

    def new_id(self) -> str:
        return "call_" + uuid.uuid4().hex[:24]

    def begins(self, functions: Functions) -> tuple[str, ...]:
        return (PYTHON, '{"name"')

    def read(self, reader: Reader, sink: Sink, functions: Functions, hidden: frozenset[str]) -> Steps[None]:
        begins = marks((PYTHON,), hidden)
        # Bare JSON may be content: it is a call only if it names a known function.
        yield from self._calls(reader, sink, functions)
        while mark := (yield from reader.until(begins, sink.content)):
            if not (yield from self._calls(reader, sink, None)):
                sink.content("" if mark in hidden else mark)

    def _calls(self, reader: Reader, sink: Sink, known: Collection[str] | None) -> Steps[bool]:
        """Read the calls that come next. Returns False, and reads nothing, if there are none."""
        start, found = reader.at, False
        while True:
            yield from reader.space()
            if not (yield from read_call(reader, sink, known)):
                reader.at = start
                return found
            found, start = True, reader.at
            yield from reader.space()
            if not (yield from reader.take(";")):
                yield from reader.take(",")

    def forced(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        return one_after_another([self._tag(function) for function in functions], "; ", parallel)

    def free(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        return in_text(['{"name": "'], [self._tag(function) for function in functions], parallel)

    def _tag(self, function: Function) -> dict[str, Any]:
        begin = f'{{"name": {json.dumps(function.name, ensure_ascii=False)}, "parameters": '
        return tag(begin, json_schema(function.schema), "}")
