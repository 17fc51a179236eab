"""Calls as Gemma 4 writes them, one after another:

    <|tool_call>call:f{a:<|"|>a string<|"|>,b:[1,true,{c:null}]}<tool_call|>

Strings stand between marks, keys have no quotes; all else is as in JSON.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from radixrt.formats.parsing.formats import (
    Function,
    Functions,
    Schema,
    constant,
    either,
    in_text,
    one_after_another,
    read_json,
    sequence,
    tag,
)
from radixrt.formats.parsing.pieces import Sink
from radixrt.formats.parsing.reader import Reader, Steps, marks
from radixrt.formats.parsing.writing import CANNOT, Writer, counted, joined, one_of, optional, repeated
from radixrt.requests.schemas.inexact import Inexact

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
CALL = "call:"
MAX_DEPTH = 32
"""Values that are nested deeper are not written by a schema, and read as strings."""
_NAME = re.compile(r"[^\s{}<]")
_KEY = re.compile(r"""[^:,{}\[\]<"\n]""")
_BARE = re.compile(r"[^,}\]<\n]")
_CONSTANTS = {"None": "null", "True": "true", "False": "false"}
_ANYTHING = rf"""
root ::= value
value ::= string | number | "true" | "false" | "null" | object | array
string ::= {json.dumps(QUOTE)} char* {json.dumps(QUOTE)}
char ::= [^<] | "<" [^|]
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
object ::= "{{" (member ("," member)*)? "}}"
member ::= [a-zA-Z_] [a-zA-Z0-9_.-]* ":" value
array ::= "[" (value ("," value)*)? "]"
"""
"""Any value, in EBNF."""


class Gemma:
    """See `formats.ToolFormat`."""

    marks = (OPEN, CLOSE, QUOTE)

    def new_id(self) -> str:
        return "call_" + uuid.uuid4().hex[:24]

    def begins(self, functions: Functions) -> tuple[str, ...]:
        return (OPEN,)

    # ------------------------------------------------------------ reading

    def read(self, reader: Reader, sink: Sink, functions: Functions, hidden: frozenset[str]) -> Steps[None]:
        begins = marks((OPEN,), hidden)
        while mark := (yield from reader.until(begins, sink.content)):
            start = reader.at
            yield from reader.space()
            if not (yield from self._call(reader, sink)):
                reader.at = start
                sink.content("" if mark in hidden else mark)

    def _call(self, reader: Reader, sink: Sink) -> Steps[bool]:
        """Read a call after its mark, to its end. Returns whether it is a call."""
        yield from reader.take(CALL)
        name = yield from reader.word(_NAME)
        yield from reader.space()
        if not name or not (yield from reader.take("{")):
            return False
        sink.call(name)
        yield from _object(reader, sink.arguments, MAX_DEPTH)
        at = reader.at
        yield from reader.space()
        yield from reader.take("}")  # some write one too many
        if not (yield from reader.take(CLOSE)) and not reader.ends_within((CLOSE,)):
            reader.at = at
        return True

    # ------------------------------------------------------------ writing

    @staticmethod
    def arguments(schema: Schema) -> dict[str, Any]:
        """See `formats.ToolFormat`."""
        return _Writer(schema).written()

    def forced(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        return one_after_another([self._tag(function) for function in functions], "", parallel)

    def free(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        return in_text([OPEN], [self._tag(function) for function in functions], parallel)

    def _tag(self, function: Function) -> dict[str, Any]:
        return tag(f"{OPEN}{CALL}{function.name}{{", self.arguments(function.schema), "}" + CLOSE)


Write = Callable[[str], None]


def _object(reader: Reader, write: Write, depth: int) -> Steps[bool]:
    """Read an object after its opening bracket. It is written as JSON, and closed unless the text ends before, in which
    case this returns False. What is no member of it ends it."""
    before = "{"
    while True:
        yield from reader.space()
        if (yield from reader.take("}")):
            break
        if not (key := (yield from _key(reader))):
            if not (yield from reader.peek()) or reader.ends_within((CLOSE,)):
                return False
            break
        write(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        before = ", "
        if not (yield from _value(reader, write, depth)):
            return False
        yield from reader.space()
        yield from reader.take(",")
    write("{}" if before == "{" else "}")
    return True


def _key(reader: Reader) -> Steps[str]:
    """Read a key and the colon behind it; returns the key, "" if there is none."""
    start = reader.at
    if (yield from reader.take(QUOTE)):
        mark, end = yield from reader.ahead(marks((QUOTE, CLOSE)), reader.at)
        key = reader.between(reader.at, end)
        reader.at = end + len(QUOTE) * (mark == QUOTE)
        if not mark:
            return ""  # the text has ended within it
    elif (yield from reader.peek()) == '"':
        key = (yield from reader.string()) or ""
    else:
        key = yield from reader.word(_KEY)
    yield from reader.space()
    if key.strip() and (yield from reader.take(":")):
        return key.strip()
    reader.at = start
    return ""


def _value(reader: Reader, write: Write, depth: int) -> Steps[bool]:
    """Read a value, which is written as JSON; False if the text ends before it does."""
    yield from reader.space()
    if (yield from reader.take(QUOTE)):
        write('"')
        whole = yield from _until_quote(reader, lambda text: write(json.dumps(text, ensure_ascii=False)[1:-1]))
        write('"' * whole)
        return whole
    first = yield from reader.peek()
    if first == "":
        return False
    if first in "{[" and not depth:
        write(json.dumps((yield from reader.nested(None)), ensure_ascii=False))
    elif first == "{":
        reader.at += 1
        return (yield from _object(reader, write, depth - 1))
    elif first == "[":
        reader.at += 1
        return (yield from _array(reader, write, depth - 1))
    elif first == '"' and (text := (yield from reader.string())) is not None:
        write(json.dumps(text, ensure_ascii=False))
    else:
        bare = (yield from reader.word(_BARE)).strip()
        if not (yield from reader.peek()):
            return False
        write(_as_json(bare))
    return True


def _array(reader: Reader, write: Write, depth: int) -> Steps[bool]:
    before = "["
    while True:
        yield from reader.space()
        if (yield from reader.take("]")):
            break
        first = yield from reader.peek()
        if not first:
            return False
        if first in ",}" or (first == "<" and not (yield from _is_next(reader, QUOTE))):
            if first != ",":
                break
            reader.at += 1
            continue
        write(before)
        before = ", "
        if not (yield from _value(reader, write, depth)):
            return False
    write("[]" if before == "[" else "]")
    return True


def _is_next(reader: Reader, literal: str) -> Steps[bool]:
    start = reader.at
    found = yield from reader.take(literal)
    reader.at = start
    return found


def _until_quote(reader: Reader, pass_on: Write) -> Steps[bool]:
    """Read the text of a string and the mark that ends it; False if the text ends before. If that mark is missing, the
    string ends before the bracket at the call's end."""
    held = ""

    def hold(text: str) -> None:
        nonlocal held
        text = held + text
        held = text[len(text.rstrip("}")) :]
        if said := text.removesuffix(held):
            pass_on(said)

    mark = yield from reader.until(marks((QUOTE, CLOSE)), hold)
    if mark == CLOSE:
        reader.at -= len(CLOSE)
        held = held[1:]
    if mark and held:
        pass_on(held)
    return bool(mark)


def _as_json(bare: str) -> str:
    """The JSON of a value without quotes; a string if it is none."""
    bare = _CONSTANTS.get(bare, bare)
    try:
        read_json(bare)
        return bare
    except ValueError:
        return json.dumps(bare, ensure_ascii=False)


# ---------------------------------------------------------------- writing


class _Writer(Writer):
    """Members are in the order of templates, by name."""

    separator = ","
    name = _KEY

    def ordered(self, properties: dict[str, Any]) -> list[tuple[str, Any]]:
        return sorted(properties.items(), key=lambda item: item[0].lower())

    def member(self, name: str | None, more: dict[str, Any], value: Any, path: tuple[str | int, ...]) -> dict[str, Any]:
        begin = sequence(more, constant(":")) if name is None else constant(f"{name}:")
        return sequence(begin, self._value(value, path))

    def _value(self, schema: Any, path: tuple[str | int, ...]) -> dict[str, Any]:
        if len(path) > 2 * MAX_DEPTH:
            raise Inexact(path, f"is nested deeper than what {CANNOT}")
        if isinstance(schema, dict) and "$ref" in schema:
            with self.inside(schema, path) as inner:
                return self._value(inner, path)
        if isinstance(schema, dict) and "anyOf" in schema:
            return either(*(self._value(one, path) for one in schema["anyOf"]))
        if schema in ({}, True):
            return {"type": "grammar", "grammar": _ANYTHING}
        if "enum" in schema:
            return one_of([self._constant(value, path) for value in schema["enum"]])
        match schema["type"]:
            case "string":
                return tag(QUOTE, self.text(schema, path), QUOTE)
            case "array":
                return tag("[", self._items(schema, path), "]")
            case "object":
                return tag("{", self.members(schema, path), "}")
        return self.json(schema)

    def _constant(self, value: Any, path: tuple[str | int, ...]) -> dict[str, Any]:
        if isinstance(value, str) and any(mark in value for mark in (QUOTE, CLOSE)):
            raise Inexact((*path, "enum"), f"holds a mark of calls, which {CANNOT}")
        return constant(f"{QUOTE}{value}{QUOTE}" if isinstance(value, str) else json.dumps(value))

    def _items(self, schema: dict[str, Any], path: tuple[str | int, ...]) -> dict[str, Any]:
        prefix = [self._value(one, (*path, "prefixItems", i)) for i, one in enumerate(schema.get("prefixItems", ()))]
        rest = schema.get("items", True)
        others = None if rest is False else self._value(rest, (*path, "items"))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not prefix:
            return constant("") if others is None else counted(others, ",", least, most)
        more = [] if others is None else [
            repeated(joined(",", others), max(least - len(prefix), 0), None if most is None else most - len(prefix))
        ]  # fmt: skip
        for i in range(len(prefix) - 1, -1, -1):
            one = sequence(joined(",", prefix[i]) if i else prefix[i], *more)
            more = [one if i < least else optional(one)]
        return more[0]
