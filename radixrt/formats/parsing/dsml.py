"""Calls as DeepSeek V3.2 writes them, all of a turn in one section:

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="f">
    <｜DSML｜parameter name="a" string="true">a string, without quotes</｜DSML｜parameter>
    <｜DSML｜parameter name="b" string="false">[1, "JSON"]</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

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

DSML = "｜DSML｜"
"""A token of its own."""
OPEN, CLOSE = f"<{DSML}function_calls>", f"</{DSML}function_calls>"
INVOKE, INVOKE_END = f'<{DSML}invoke name="', f"</{DSML}invoke>"
_NAME = re.compile(r'[^"<>\n]')
ARGUMENT = Tags(
    f'<{DSML}parameter name="', ('"',), f"</{DSML}parameter>", (f"</{DSML}param", f"<{DSML}param"),
    (f"</{DSML}invoke", CLOSE[:-1]), INVOKE, (QUOTED,), _NAME,
    kinds=((' string="true">', True), (' string="false">', False)),
)  # fmt: skip


class Dsml:
    """See `formats.ToolFormat`."""

    marks = (DSML,)
    arguments = Written(ARGUMENT.begin, '" string="true">', f"{ARGUMENT.end}\n", _NAME, '" string="false">').arguments

    def new_id(self) -> str:
        return "call_" + uuid.uuid4().hex[:24]

    def begins(self, functions: Functions) -> tuple[str, ...]:
        return (OPEN,)

    # ------------------------------------------------------------ reading

    def read(self, reader: Reader, sink: Sink, functions: Functions, hidden: frozenset[str]) -> Steps[None]:
        call = partial(read_call, reader, sink, functions, ARGUMENT)
        # The token is a part of other marks: where it is in no call, it stays.
        yield from read_section(reader, sink, (OPEN, CLOSE), hidden - {DSML}, call, (INVOKE,))

    # ------------------------------------------------------------ writing

    def forced(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        return self._section("\n\n", functions, parallel)

    def free(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        section = self._section("", functions, parallel)
        return in_text([OPEN], [section], several=False)

    def _section(self, before: str, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        calls = one_after_another([self._tag(function) for function in functions], "\n", parallel)
        return tag(f"{before}{OPEN}\n", calls, f"\n{CLOSE}")

    def _tag(self, function: Function) -> dict[str, Any]:
        return tag(f"{INVOKE}{function.name}{QUOTED}\n", self.arguments(function.schema), INVOKE_END)
