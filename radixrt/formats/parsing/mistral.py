"""Calls as Mistral's models write them, by the version of their tokenizer (mistral-common):

to 7        [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]
11          [TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{...} for each; its result follows under the same id
13          [TOOL_CALLS]f[ARGS]{...} for each
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Sequence
from typing import Any

from radixrt.formats.parsing.arrays import call_tag, read_array
from radixrt.formats.parsing.calls import begins_object
from radixrt.formats.parsing.formats import Function, Functions, in_text, json_schema, one_after_another, sequence, tag
from radixrt.formats.parsing.pieces import Sink
from radixrt.formats.parsing.reader import Reader, Steps, marks
from radixrt.formats.parsing.writing import Json

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[\w.:/-]")
_ALPHABET = string.ascii_letters + string.digits
_ID = re.compile("[a-zA-Z0-9]{9}")
"""Mistral's templates refuse other ids."""


class Mistral(Json):
    """See `formats.ToolFormat`. `opening` is the beginning of the array of calls; None for the forms without one.
    `names_calls`: whether calls have ids (version 11)."""

    marks = (CALLS, ARGS, CALL_ID)

    def __init__(self, opening: str | None = CALLS + " [", names_calls: bool = False) -> None:
        self._opening = opening
        self._names_calls = names_calls

    def new_id(self) -> str:
        return "".join(secrets.choice(_ALPHABET) for _ in range(9))

    def begins(self, functions: Functions) -> tuple[str, ...]:
        return (CALLS,)

    def read(self, reader: Reader, sink: Sink, functions: Functions, hidden: frozenset[str]) -> Steps[None]:
        begins = marks((CALLS,), hidden)
        while mark := (yield from reader.until(begins, sink.content)):
            start = reader.at
            yield from reader.space()
            found = yield from (read_array if (yield from reader.take("[")) else self._one)(reader, sink)
            if not found:
                reader.at = start
                sink.content("" if mark in hidden else mark)

    def _one(self, reader: Reader, sink: Sink) -> Steps[bool]:
        name, id = (yield from reader.word(_NAME)), ""
        yield from reader.space()
        if (yield from reader.take(CALL_ID)):
            id = yield from reader.word(_NAME)
        yield from reader.take(ARGS)
        yield from reader.space()
        if not name or not (yield from begins_object(reader)):
            return False
        sink.call(name, id if _ID.fullmatch(id) else "")
        yield from reader.nested(sink.arguments)
        return True

    def forced(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        calls = self._calls(functions, parallel)
        if self._opening is None:
            return calls
        return tag(self._opening, calls, "]")

    def free(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        tags = [self._tag(function) for function in functions]
        if self._opening is not None:
            tags = [tag(self._opening, self._calls(functions, parallel), "]")]
        return in_text([CALLS], tags, several=parallel and self._opening is None)

    def _calls(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        return one_after_another(
            [self._tag(function) for function in functions], "" if self._opening is None else ", ", parallel
        )

    def _tag(self, function: Function) -> dict[str, Any]:
        if self._opening is not None:
            return call_tag(function)
        schema = json_schema(function.schema)
        if not self._names_calls:
            return tag(f"{CALLS}{function.name}{ARGS}", schema, "")
        id = {"type": "regex", "pattern": _ID.pattern}
        arguments = sequence(id, {"type": "const_string", "value": ARGS}, schema)
        return tag(f"{CALLS}{function.name}{CALL_ID}", arguments, "")
