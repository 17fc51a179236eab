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
    json_schema,
    one_after_another,
    read_json,
    sequence,
    tag,
)
from radixrt.formats.parsing.pieces import Sink
from radixrt.formats.parsing.python_calls import in_order, some
from radixrt.formats.parsing.reader import Reader, Steps, marks

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
number ::= "-"? [0-9]+ ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
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

    def forced(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        return one_after_another([_tag(function) for function in functions], "", parallel)

    def free(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        return in_text([OPEN], [_tag(function) for function in functions], parallel)


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


def _tag(function: Function) -> dict[str, Any]:
    """A structural tag's format for a call of the function."""
    members = _members(function.schema, function.schema, MAX_DEPTH)
    return tag(f"{OPEN}{CALL}{function.name}{{", members, "}" + CLOSE)


def _members(schema: Schema, root: Schema, depth: int) -> dict[str, Any]:
    """A structural tag's format for the members of an object, in the order of templates, by name."""
    if not isinstance(schema, dict) or not (parts := schema.get("properties")):
        closed = isinstance(schema, dict) and schema.get("additionalProperties") is False
        name = {"type": "regex", "pattern": "[a-zA-Z_][a-zA-Z0-9_.-]*:"}
        return constant("") if closed else some(sequence(name, _anything()), ",")
    values = {
        name: sequence(constant(f"{name}:"), _written(parts[name], root, depth))
        for name in sorted(parts, key=str.lower)
    }
    return in_order(values, schema.get("required", ()), ",")


def _anything() -> dict[str, Any]:
    return {"type": "grammar", "grammar": _ANYTHING}


def _written(schema: Schema, root: Schema, depth: int) -> dict[str, Any]:
    """A structural tag's format for a value; any value where the schema has more than types, constants and parts."""
    if not isinstance(schema, dict) or not depth:
        return _anything()
    if match := re.fullmatch(r"#/(\$defs|definitions)/([^/]+)", str(schema.get("$ref", ""))):
        whole = root if isinstance(root, dict) else {}
        return _written((whole.get(match[1]) or {}).get(match[2], True), root, depth // 2)
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if values and not any(isinstance(value, (dict, list)) for value in values):
        return either(*(constant(f"{QUOTE}{v}{QUOTE}" if isinstance(v, str) else json.dumps(v)) for v in values))
    if parts := schema.get("anyOf") or schema.get("oneOf"):
        return either(*(_written(part, root, depth // 2) for part in parts))
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return either(*(_written({**schema, "type": kind}, root, depth // 2) for kind in kinds))
    match kinds:
        case "string":
            return tag(QUOTE, {"type": "any_text"}, QUOTE)
        case "integer" | "number" | "boolean" | "null":
            return json_schema(schema)
        case "array":
            return tag("[", some(_written(schema.get("items", True), root, depth // 2), ","), "]")
        case "object":
            return tag("{", _members(schema, root, depth // 2), "}")
    return _anything()
