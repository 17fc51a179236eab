"""Calls as OLMo 3 writes them, in Python syntax, one per line, all of a turn in one section:

    <function_calls>f(a="text", b=[1, 2])
    g()</function_calls>

A call is read by `python_calls`.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

from radixrt.formats.parsing.formats import Function, Functions, in_text, one_after_another, read_section, tag
from radixrt.formats.parsing.pieces import Sink
from radixrt.formats.parsing.python_calls import Python, read_call
from radixrt.formats.parsing.reader import Reader, Steps

OPEN, CLOSE = "<function_calls>", "</function_calls>"


class Olmo(Python):
    """See `formats.ToolFormat`."""

    marks = (OPEN, CLOSE)

    def new_id(self) -> str:
        return "call_" + uuid.uuid4().hex[:24]

    def begins(self, functions: Functions) -> tuple[str, ...]:
        return (OPEN,)

    def read(self, reader: Reader, sink: Sink, functions: Functions, hidden: frozenset[str]) -> Steps[None]:
        yield from read_section(reader, sink, self.marks, hidden, partial(read_call, reader, sink, functions))

    def forced(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        return tag(OPEN, one_after_another([self.call_tag(function) for function in functions], "\n", parallel), CLOSE)

    def free(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        section = self.forced(functions, parallel)
        return in_text([OPEN], [section], several=False)
