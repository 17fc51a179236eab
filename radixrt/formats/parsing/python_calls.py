"""Calls in Python syntax, f(a="text", b=[1, 2]), which several formats have: how to read them, and grammars that make a
model write them.

Values are JSON or Python literals; anything else is taken as a string. An argument without a name is the function's
next parameter.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import warnings
from collections.abc import Collection
from typing import Any

from radixrt.formats.parsing.formats import (
    Function,
    Functions,
    Schema,
    constant,
    read_json,
    sequence,
    tag,
)
from radixrt.formats.parsing.pieces import Sink
from radixrt.formats.parsing.reader import Reader, Steps
from radixrt.formats.parsing.writing import Writer

_NAME = re.compile(r"[\w.-]")
_ARGUMENT = re.compile(r"""[^\n=,()\[\]{}"']""")
_UNREADABLE = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)
_CONSTANTS = {"true": True, "false": False, "null": None}

# ---------------------------------------------------------------- reading


def read_call(
    reader: Reader, sink: Sink, functions: Functions, known: Collection[str] | None = None
) -> Steps[bool]:  # fmt: skip
    """Read a call to its end, if one comes next, and if it is of a function in `known`, where that is given; otherwise
    only white space. Returns whether there was one."""
    yield from reader.space()
    start = reader.at
    name = yield from reader.word(_NAME)
    if not name or (known is not None and name not in known) or not (yield from reader.take("(")):
        reader.at = start
        return False
    sink.call(name)
    yield from _arguments(reader, sink, functions.get(name, True))
    return True


def _arguments(reader: Reader, sink: Sink, schema: Schema) -> Steps[None]:
    """Read a call's arguments and the closing bracket. They go to the sink as a JSON object, value by value, which is
    closed unless the text ends before."""
    names, before = iter(_properties(schema)), "{"
    while not (yield from _closed(reader)):
        name = (yield from _key(reader)) or next(names, "")
        value = yield from reader.literal()
        ended = not (yield from reader.peek())
        if ended or not name or not value.strip():
            if not ended:
                yield from reader.take(")")
                break
            return
        sink.arguments(f"{before}{json.dumps(name, ensure_ascii=False)}: {_as_json(value)}")
        before = ", "
        if not (yield from reader.take(",")) and (yield from reader.peek()) != ")":
            break
    sink.arguments("{}" if before == "{" else "}")


def _closed(reader: Reader) -> Steps[bool]:
    yield from reader.space()
    return (yield from reader.take(")"))


def _key(reader: Reader) -> Steps[str]:
    """Read `name=` before a value; returns the name, "" if there is none."""
    start = reader.at
    name = yield from reader.word(_ARGUMENT)
    if name.strip() and (yield from reader.take("=")):
        return name.strip()
    reader.at = start
    return ""


def _as_json(written: str) -> str:
    """The JSON of a value; a string if it is neither JSON nor a Python literal."""
    plain = written.strip()
    with contextlib.suppress(*_UNREADABLE):
        read_json(plain)
        return plain
    lines = plain.replace("\n", "\\n")  # strings may contain raw line feeds
    for read, text in ((json.loads, lines), (_of_python, plain), (_of_python, lines)):
        with contextlib.suppress(*_UNREADABLE):
            return json.dumps(read(text), allow_nan=False)  # as ASCII, since there may be lone surrogates
    return json.dumps(plain, ensure_ascii=False)


def _of_python(text: str) -> Any:
    with warnings.catch_warnings(action="ignore"):  # about invalid escapes
        tree = ast.parse(text, mode="eval")
    return ast.literal_eval(_Constants().visit(tree))


class _Constants(ast.NodeTransformer):
    """Replaces JSON's constants (true, false, null) in Python syntax."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node


# ---------------------------------------------------------------- writing


class Python:
    """How formats write arguments in Python syntax."""

    @staticmethod
    def arguments(schema: Schema) -> dict[str, Any]:
        """See `formats.ToolFormat`: required ones first, in the order of the schema."""
        return _Writer(schema).written()

    def call_tag(self, function: Function) -> dict[str, Any]:
        """A structural tag's format for a call of the function."""
        return tag(f"{function.name}(", self.arguments(function.schema), ")")


class _Writer(Writer):
    separator = ", "
    name = _ARGUMENT

    def member(self, name: str | None, more: dict[str, Any], value: Any, path: tuple[str | int, ...]) -> dict[str, Any]:
        begin = sequence(more, constant("=")) if name is None else constant(f"{name}=")
        return sequence(begin, self.json(value))


def _properties(schema: Schema) -> dict[str, Schema]:
    return schema.get("properties") or {} if isinstance(schema, dict) else {}
