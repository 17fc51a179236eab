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
from collections.abc import Collection, Iterator
from typing import Any

from radixrt.formats.parsing.formats import (
    Function,
    Functions,
    Schema,
    constant,
    json_schema,
    read_json,
    sequence,
    tag,
)
from radixrt.formats.parsing.pieces import Sink
from radixrt.formats.parsing.reader import Reader, Steps

_NAME = re.compile(r"[\w.-]")
_ARGUMENT = re.compile(r"""[^\n=,()\[\]{}"']""")
_ANY_NAME = "[a-zA-Z_][a-zA-Z0-9_]*"
"""In grammars: the name of an argument that the schema does not define."""
_DEFINITIONS = ("$defs", "definitions")
MAX_ORDERED_ARGUMENTS = 16
"""The most optional arguments for which a grammar fixes the order, that of the schema: its size is quadratic in
them."""
MAX_WRITTEN_BYTES = 1 << 20
"""The most bytes of definitions, counted for each argument, for which a grammar fixes the order of arguments."""
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


def call_tag(function: Function) -> dict[str, Any]:
    """A structural tag's format for a call of the function."""
    return tag(f"{function.name}(", written(function.schema), ")")


def written(schema: Schema) -> dict[str, Any]:
    """A structural tag's format for named arguments: required ones first, in the order of the schema."""
    values = dict(_named_values(schema))
    if values and len(values) * len(json.dumps(_shared(schema))) > MAX_WRITTEN_BYTES:
        return _anything()
    if not values:
        closed = isinstance(schema, dict) and schema.get("additionalProperties") is False
        return constant("") if closed else _anything()
    return in_order(values, schema.get("required", ()) if isinstance(schema, dict) else (), ", ")


def in_order(values: dict[str, dict[str, Any]], names: Collection[str], separator: str) -> dict[str, Any]:
    """A structural tag's format for arguments, given those of each: the required ones, `names`, come first."""
    required = [name for name in values if name in names]
    others = [
        {"type": "optional", "content": sequence(constant(separator), values[x])} for x in values if x not in required
    ]
    first = [part for name in required for part in (constant(separator), values[name])][1:]
    if required:
        return sequence(*first, *others)
    if len(values) > MAX_ORDERED_ARGUMENTS:
        return some({"type": "or", "elements": list(values.values())}, separator)
    # Any of the optional arguments may be the first.
    begins = [sequence(value, *others[n + 1 :]) for n, value in enumerate(values.values())]
    return {"type": "optional", "content": {"type": "or", "elements": begins}}


def _named_values(schema: Schema) -> Iterator[tuple[str, dict[str, Any]]]:
    """The formats of `name=value` for the arguments that the schema defines."""
    shared = _shared(schema)
    for name, part in _properties(schema).items():
        value = part | shared if isinstance(part, dict) else part
        yield name, sequence(constant(f"{name}="), json_schema(value))


def _anything() -> dict[str, Any]:
    return some(sequence({"type": "regex", "pattern": f"{_ANY_NAME}="}, json_schema(True)))


def some(one: dict[str, Any], separator: str = ", ") -> dict[str, Any]:
    """Any number of `one`, also none."""
    more = {"type": "star", "content": sequence(constant(separator), one)}
    return {"type": "optional", "content": sequence(one, more)}


def _shared(schema: Schema) -> dict[str, Any]:
    """The definitions that the arguments' schemas may refer to."""
    return {key: schema[key] for key in _DEFINITIONS if key in schema} if isinstance(schema, dict) else {}


def _properties(schema: Schema) -> dict[str, Schema]:
    return schema.get("properties") or {} if isinstance(schema, dict) else {}
