"""Calls as Hermes and Qwen write them: <tool_call>{"name": "f", "arguments": {...}}</tool_call>, one after another."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from radixrt.formats.parsing.calls import read_call
from radixrt.formats.parsing.formats import (
    Function,
    Functions,
    in_text,
    json_schema,
    one_after_another,
    read_again,
    tag,
)
from radixrt.formats.parsing.pieces import Sink
from radixrt.formats.parsing.reader import Reader, Steps, marks
from radixrt.formats.parsing.writing import Json

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(Json):
    """See `formats.ToolFormat`."""

    marks = (OPEN, CLOSE)

    def new_id(self) -> str:
        return "call_" + uuid.uuid4().hex[:24]

    def begins(self, functions: Functions) -> tuple[str, ...]:
        return (OPEN,)

    def read(self, reader: Reader, sink: Sink, functions: Functions, hidden: frozenset[str]) -> Steps[None]:
        begins, ends = marks((OPEN,), hidden), marks((OPEN, CLOSE), hidden)
        mark = yield from reader.until(begins, sink.content)
        while mark:
            start = reader.at
            yield from reader.space()
            if (yield from read_call(reader, sink)):
                mark = yield from reader.until(ends, sink.content)
                sink.bound()
                if mark == CLOSE:
                    yield from read_again(reader, CLOSE)
                if mark == OPEN:
                    continue
            else:
                reader.at = start
                sink.content("" if mark in hidden else mark)
            mark = yield from reader.until(begins, sink.content)

    def forced(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        return one_after_another([self._tag(function) for function in functions], "\n", parallel)

    def free(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        return in_text([OPEN], [self._tag(function) for function in functions], parallel)

    def _tag(self, function: Function) -> dict[str, Any]:
        begin = f'{OPEN}\n{{"name": {json.dumps(function.name, ensure_ascii=False)}, "arguments": '
        return tag(begin, json_schema(function.schema), "}\n" + CLOSE)
