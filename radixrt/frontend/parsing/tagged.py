"""Arguments of calls between tags, as Qwen3-Coder, GLM, MiniMax and DeepSeek V3.2 write them. The function's schema
tells the type of a value, if it is not written: strings are written without quotes, other types as JSON."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from typing import Any

from radixrt.frontend.parsing.formats import Function, Functions, Schema, read_json
from radixrt.frontend.parsing.pieces import Sink
from radixrt.frontend.parsing.reader import Reader, Steps, marks

_REFERENCE = re.compile(r"#/(?:\$defs|definitions)/([^/]+)")
QUOTED = '">'
"""What comes after a name in quotes."""
MAX_REFERENCES = 16
MAX_SPACE_CHARS = 2
"""The most consecutive white-space characters that a grammar allows."""


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags before an argument's name, between name and value (in order), and after the value."""

    begin: str
    between: tuple[str, ...]
    end: str
    name: re.Pattern[str]
    """The characters of a name."""
    lines: bool = False
    """Whether a value is on lines of its own."""
    kinds: tuple[tuple[str, bool], ...] = ()
    """If the type of a value is written, in place of the schema's: (what comes before the value, whether that says that
    it is a string)."""


def read_arguments(reader: Reader, sink: Sink, schema: Schema, tags: Tags, close: str) -> Steps[None]:
    """Read a call's arguments, and `close`, if it is there. They go to the sink as a JSON object, which is closed
    unless the text ends before."""
    whole, before = True, "{"
    while whole:
        yield from reader.space()
        if not (name := (yield from _name(reader, tags))):
            break
        if (known := (yield from _kind(reader, _of_key(schema, name), tags))) is None:
            break
        sink.arguments(f"{before}{json.dumps(name, ensure_ascii=False)}: ")
        whole = yield from _value(reader, sink, known, tags)
        before = ", "
    closed = yield from reader.take(close)
    written = [mark for mark, _ in tags.kinds]
    if closed or (whole and not reader.ends_within((tags.begin, *tags.between, *written, close))):
        sink.arguments("{}" if before == "{" else "}")


def read_call(reader: Reader, sink: Sink, functions: Functions, begin: str, close: str, tags: Tags) -> Steps[bool]:
    """Read a call from `begin`, which ends before its name, to `close`, if one comes next, and otherwise only white
    space. Returns whether there was one."""
    yield from reader.space()
    start = reader.at
    name = (yield from reader.word(tags.name)) if (yield from reader.take(begin)) else ""
    if not name or not (yield from reader.take(QUOTED)):
        reader.at = start
        return False
    sink.call(name)
    yield from read_arguments(reader, sink, functions.get(name, {}), tags, close)
    return True


def _name(reader: Reader, tags: Tags) -> Steps[str]:
    """Read the tags before a value; returns the argument's name, "" if there is none."""
    if not (yield from reader.take(tags.begin)):
        return ""
    name = yield from reader.word(tags.name)
    for mark in tags.between:
        yield from reader.space()
        if not (yield from reader.take(mark)):
            return ""
    return name.strip()


def _kind(reader: Reader, schema: Schema, tags: Tags) -> Steps[Schema | None]:
    """Read the type of a value, if it is written. Returns the schema of the value; None if no type comes next."""
    if not tags.kinds:
        return schema
    for mark, is_string in tags.kinds:
        if (yield from reader.take(mark)):
            return {"type": "string"} if is_string else {} if _kinds(schema) == {"string"} else schema
    return None


def content_of(function: Function, style: str) -> dict[str, Any]:
    """A structural tag's format for arguments in a `style` of xgrammar, optionally followed by a line feed."""
    return {
        "type": "json_schema",
        "json_schema": function.schema,
        "style": style,
        "max_whitespace_cnt": MAX_SPACE_CHARS,
    }


def _value(reader: Reader, sink: Sink, schema: Schema, tags: Tags) -> Steps[bool]:
    """Read a value, and the tag that ends it; False if the text ends before. A string is passed on as it arrives."""
    if tags.lines:
        yield from _line_end(reader)
    last, ends = "\n" * tags.lines, marks((tags.end,))
    if _kinds(schema) - {"string"}:
        found: list[str] = []
        mark = yield from reader.until(ends, found.append)
        sink.arguments(_as_json("".join(found).removesuffix(last), schema))
        return bool(mark)
    sink.arguments('"')
    held = ""

    def pass_on(text: str) -> None:
        """Pass on all but a trailing line feed, which may belong to the format."""
        nonlocal held
        text = held + text
        held = last if text.endswith(last) else ""
        sink.arguments(json.dumps(text.removesuffix(held), ensure_ascii=False)[1:-1])

    if not (yield from reader.until(ends, pass_on)):
        return False
    sink.arguments('"')
    return True


def _line_end(reader: Reader) -> Steps[None]:
    if (yield from reader.peek()) == "\n":
        reader.at += 1


# ---------------------------------------------------------------- what a text stands for


def _of_key(schema: Schema, key: str) -> Schema:
    """The schema of an argument, references resolved; {} if there is none."""
    if not isinstance(schema, dict):
        return {}
    found = schema.get("properties", {}).get(key, {})
    for _ in range(MAX_REFERENCES):
        match = _REFERENCE.fullmatch(found.get("$ref", "")) if isinstance(found, dict) else None
        if not match:
            break
        found = (schema.get("$defs") or schema.get("definitions") or {}).get(match[1], {})
    return found


def _kinds(schema: Schema) -> set[str]:
    """The JSON types that a value may have, as far as the schema states them directly; otherwise "any"."""
    if not isinstance(schema, dict):
        return {"any"}
    if kind := schema.get("type"):
        return {kind} if isinstance(kind, str) else set(kind)
    for word in ("anyOf", "oneOf"):
        if parts := schema.get(word):
            return set().union(*map(_kinds, parts))
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    return {"string" if isinstance(value, str) else "any" for value in values} or {"any"}


def _as_json(text: str, schema: Schema) -> str:
    """The JSON of a text; a string if it is not JSON of a type that the schema allows."""
    kinds = _kinds(schema)
    plain = text.strip()
    if "boolean" in kinds and plain in ("True", "False"):  # templates write them so
        return plain.lower()
    if "null" in kinds and plain in ("None", "null"):
        return "null"
    try:
        value = read_json(plain)
    except ValueError:
        return _of_python(plain, kinds) or json.dumps(text, ensure_ascii=False)
    if isinstance(value, str) or ("string" in kinds and not isinstance(value, (dict, list))):
        return json.dumps(text, ensure_ascii=False)
    return plain


def _of_python(text: str, kinds: set[str]) -> str:
    """The JSON of a list or dictionary in Python syntax, as templates of Qwen3-Coder and Seed-OSS show such arguments
    to the model; "" if it is none, or the schema does not allow the type."""
    if text[:1] not in ("[", "{") or not kinds & {"array", "object", "any"}:
        return ""
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return ""
