"""Calls as MiniMax M2 writes them, all of a turn in one section:

    <minimax:tool_call>
    <invoke name="f">
    <parameter name="a">the value; a string is written without quotes, other types as JSON</parameter>
    </invoke>
    </minimax:tool_call>

Values are taken literally, including line feeds.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

from radixrt.formats.parsing.formats import Function, Functions, in_text, one_after_another, read_section, tag
from radixrt.formats.parsing.pieces import Sink
from radixrt.formats.parsing.reader import Reader, Steps
from radixrt.formats.parsing.tagged import QUOTED, Tags, Written, read_call

OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE, INVOKE_END = '<invoke name="', "</invoke>"
_NAME = re.compile(r'[^"<>\n]')
ARGUMENT = Tags(
    '<parameter name="', (QUOTED,), "</parameter>", ("</param", "<param"), ("</invoke", "</minimax:tool_call"), INVOKE,
    (QUOTED,), _NAME,
)  # fmt: skip


class MiniMax:
    """See `formats.ToolFormat`."""

    marks = (OPEN, CLOSE)
    arguments = Written(ARGUMENT.begin, QUOTED, f"{ARGUMENT.end}\n", _NAME).arguments

    def new_id(self) -> str:
        return "call_" + uuid.uuid4().hex[:24]

    def begins(self, functions: Functions) -> tuple[str, ...]:
        return (OPEN,)

    # ------------------------------------------------------------ reading

    def read(self, reader: Reader, sink: Sink, functions: Functions, hidden: frozenset[str]) -> Steps[None]:
        call = partial(read_call, reader, sink, functions, ARGUMENT)
        yield from read_section(reader, sink, self.marks, hidden, call, (INVOKE,))

    # ------------------------------------------------------------ writing

    def forced(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        calls = one_after_another([self._tag(function) for function in functions], "\n", parallel)
        return tag(f"{OPEN}\n", calls, f"\n{CLOSE}")

    def free(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        section = self.forced(functions, parallel)
        return in_text([OPEN], [section], several=False)

    def _tag(self, function: Function) -> dict[str, Any]:
        return tag(f"{INVOKE}{function.name}{QUOTED}\n", self.arguments(function.schema), INVOKE_END)
