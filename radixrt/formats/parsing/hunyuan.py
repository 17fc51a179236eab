"""Calls as Hunyuan's models write them, all of a turn in one section:

    <tool_calls>
    <tool_call>f<tool_sep>
    <arg_key>a</arg_key>
    <arg_value>the value; a string is written without quotes, other types as JSON</arg_value>
    </tool_call>
    </tool_calls>

Hy3's tokenizers may add a suffix to all tags: <tool_calls:opensource>. Its dense predecessors write the arguments as
JSON in a Markdown code block, and A13B all calls as an array of JSON in the section.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from typing import Any

from radixrt.formats.parsing.arrays import read_array
from radixrt.formats.parsing.calls import begins_object
from radixrt.formats.parsing.formats import (
    Function,
    Functions,
    in_text,
    one_after_another,
    tag,
)
from radixrt.formats.parsing.pieces import Sink
from radixrt.formats.parsing.reader import Reader, Steps, marks
from radixrt.formats.parsing.tagged import Tags, Written, begins, read_arguments

_WORD = re.compile(r"[^<>{\s]")
FENCE, FENCE_END = "```json", "```"


class Hunyuan:
    """See `formats.ToolFormat`. All three forms are parsed, and Hy3's is written. `suffix`: that of the tags."""

    def __init__(self, suffix: str = "") -> None:
        self._suffix = suffix
        self._open, self._close = f"<tool_calls{suffix}>", f"</tool_calls{suffix}>"
        self._call, self._call_end = f"<tool_call{suffix}>", f"</tool_call{suffix}>"
        self._separator = f"<tool_sep{suffix}>"
        key, value = f"arg_key{suffix}", f"arg_value{suffix}"
        self._argument = Tags(
            f"<{key}>", (f"<{value}>",), f"</{value}>", ("</arg", "<arg_val"),
            ("</tool_call" + suffix + ">", "</tool_calls"), self._call, (self._separator,), re.compile(r"[^<>]"),
            name_end="</arg_key",
        )  # fmt: skip
        middle, end = f"</{key}>\n<{value}>", f"</{value}>\n"
        self.arguments = Written(self._argument.begin, middle, end, self._argument.name).arguments
        self.marks: tuple[str, ...] = (
            self._open, self._close, self._call, self._call_end, self._separator,
            f"<{key}>", f"</{key}>", f"<{value}>", f"</{value}>",
        )  # fmt: skip

    def new_id(self) -> str:
        return "call_" + uuid.uuid4().hex[:24]

    def begins(self, functions: Functions) -> tuple[str, ...]:
        return (self._open, self._call)

    # ------------------------------------------------------------ reading

    def read(self, reader: Reader, sink: Sink, functions: Functions, hidden: frozenset[str]) -> Steps[None]:
        found = marks(self.begins(functions), hidden)
        while mark := (yield from reader.until(found, sink.content)):
            start = reader.at
            if (yield from self._calls(reader, sink, functions, mark)):
                at = reader.at
                yield from reader.space()
                if not (yield from reader.take(self._close)) and not reader.ends_within((self._close,)):
                    reader.at = at
                sink.bound()
            else:
                reader.at = start
                sink.content("" if mark in hidden else mark)

    def _calls(self, reader: Reader, sink: Sink, functions: Functions, mark: str) -> Steps[bool]:
        """Read the calls of a section after `mark`. Returns whether there are any."""
        if mark == self._call:
            return (yield from self._one(reader, sink, functions))
        yield from reader.space()
        if (yield from reader.take("[")):
            return (yield from read_array(reader, sink))
        found = False
        while True:
            start = reader.at
            yield from reader.space()
            if not ((yield from reader.take(self._call)) and (yield from self._one(reader, sink, functions))):
                reader.at = start
                return found
            found = True

    def _one(self, reader: Reader, sink: Sink, functions: Functions) -> Steps[bool]:
        """Read a call after its mark. Returns whether it is a call."""
        yield from reader.space()
        name = yield from reader.word(_WORD)
        yield from reader.space()
        if not name or not (yield from reader.take(self._separator)):
            return False
        yield from reader.space()
        start = reader.at
        if name == "function" and (other := (yield from reader.word(_WORD))):  # the dense models write the type first
            name = other
            yield from reader.space()
            yield from reader.take(FENCE)
            yield from reader.space()
        if (yield from begins_object(reader)):
            sink.call(name)
            yield from reader.nested(sink.arguments)
            yield from reader.space()
            yield from reader.take(FENCE_END)
            yield from reader.space()
            if not (yield from reader.take(self._call_end)):
                reader.ends_within((self._call_end,))
            return True
        reader.at = start
        if not (yield from begins(reader, self._argument)):
            return False
        sink.call(name)
        yield from read_arguments(reader, sink, functions.get(name, {}), self._argument)
        return True

    # ------------------------------------------------------------ writing

    def forced(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        calls = one_after_another([self._tag(function) for function in functions], "\n", parallel)
        return tag(f"{self._open}\n", calls, f"\n{self._close}")

    def free(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        return in_text([self._open], [self.forced(functions, parallel)], several=False)

    def _tag(self, function: Function) -> dict[str, Any]:
        return tag(f"{self._call}{function.name}{self._separator}\n", self.arguments(function.schema), self._call_end)
