"""Answers as Solar Open writes them, in messages:

    <|think|>Reasoning.<|end|><|begin|>assistant
    <|content|>Content.<|end|>
or  <|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>f<|tool_call:args|>{...}<|tool_call:end|>...<|calls|>

A prompt ends with the first <|begin|>assistant. Thoughts are parsed by a `ReasoningFormat`.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Sequence
from typing import Any

from radixrt.formats.parsing.calls import begins_object
from radixrt.formats.parsing.formats import (
    Framed,
    Function,
    Functions,
    constant,
    in_text,
    json_schema,
    one_after_another,
    sequence,
    tag,
)
from radixrt.formats.parsing.pieces import Sink
from radixrt.formats.parsing.reader import Reader, Steps, marks
from radixrt.formats.parsing.writing import Json

BEGIN, THINK, CONTENT, CALLS = "<|begin|>", "<|think|>", "<|content|>", "<|tool_calls|>"
END, CALLS_END = "<|end|>", "<|calls|>"
CALL, NAME, ARGS, CALL_END = "<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>"
NEXT = f"{BEGIN}assistant"
_FRAME = frozenset({NEXT, THINK, CONTENT, END, CALLS_END})
_ALPHABET = string.ascii_lowercase + string.digits
_ID = re.compile("[a-z0-9]{10}")
_WORD = re.compile(r"[^\s<]")


class Solar(Framed, Json):
    """See `formats.ToolFormat`. A call's id is the one that the model wrote, which its template writes again."""

    marks = (BEGIN, THINK, CONTENT, CALLS, END, CALLS_END, CALL, NAME, ARGS, CALL_END)

    def new_id(self) -> str:
        return "".join(secrets.choice(_ALPHABET) for _ in range(10))

    def begins(self, functions: Functions) -> tuple[str, ...]:
        return (f"{NEXT}{CALLS}", CALLS, CALL)

    # ------------------------------------------------------------ reading

    def read(self, reader: Reader, sink: Sink, functions: Functions, hidden: frozenset[str]) -> Steps[None]:
        begins = marks((CALLS, CALL), hidden - {BEGIN} | _FRAME)
        first = yield from reader.take(NEXT + CALLS)
        while mark := CALLS if first else (yield from reader.until(begins, sink.content)):
            start, first = reader.at, False
            if mark == CALL:
                found = yield from self._call(reader, sink)
            else:
                yield from reader.space()
                found = (yield from reader.take(CALL)) and (yield from self._call(reader, sink))
            if not found:
                reader.at = start
                sink.content("" if mark in hidden else mark)

    def _call(self, reader: Reader, sink: Sink) -> Steps[bool]:
        """Read a call after its mark. Returns whether it is a call."""
        id = yield from reader.word(_WORD)
        named = yield from reader.take(NAME)
        name = (yield from reader.word(_WORD)) if named else ""
        if not name or not (yield from reader.take(ARGS)):
            return False
        yield from reader.space()
        if not (yield from begins_object(reader)):
            return False
        sink.call(name, id if _ID.fullmatch(id) else "")
        yield from reader.nested(sink.arguments)
        yield from reader.space()
        if not (yield from reader.take(CALL_END)):
            reader.ends_within((CALL_END,))
        return True

    # ------------------------------------------------------------ writing

    def forced(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        return _message(self._calls(functions, parallel))

    def free(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        return in_text([CALLS], [self._calls(functions, parallel)], several=False)

    def with_text(self, text: dict[str, Any]) -> dict[str, Any]:
        return _message(tag(CONTENT, text, ""))

    def _calls(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        return tag(CALLS, one_after_another([_tag(function) for function in functions], "", parallel), CALLS_END)


def _tag(function: Function) -> dict[str, Any]:
    id = {"type": "regex", "pattern": _ID.pattern}
    arguments = sequence(id, constant(f"{NAME}{function.name}{ARGS}"), json_schema(function.schema))
    return tag(CALL, arguments, CALL_END)


def _message(form: dict[str, Any]) -> dict[str, Any]:
    """A message, whose beginning is in the prompt unless there were thoughts."""
    return sequence({"type": "optional", "content": constant(NEXT)}, form)
