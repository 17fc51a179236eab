"""Calls as Qwen3-Coder writes them, each argument between tags of its own:

    <tool_call>
    <function=f>
    <parameter=a>
    what is meant, which is no JSON where it is a string
    </parameter>
    </function>
    </tool_call>

What a text stands for is told by the schema of the function's arguments.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

from radixrt.frontend.parsing.formats import Function, Functions, Schema, one_after_another, tag
from radixrt.frontend.parsing.pieces import Sink
from radixrt.frontend.parsing.reader import Reader, Steps, marks

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\s]")
_REFERENCE = re.compile(r"#/(?:\$defs|definitions)/([^/]+)")
MOST_REFERENCES = 16
MOST_SPACE = 2
"""Characters of it in a row that a grammar allows."""


class QwenCoder:
    """See `formats.ToolFormat`."""

    marks = (OPEN, CLOSE)

    def new_id(self) -> str:
        return "call_" + uuid.uuid4().hex[:24]

    # ------------------------------------------------------------ reading

    def read(self, reader: Reader, sink: Sink, functions: Functions, hidden: frozenset[str]) -> Steps[None]:
        begins = marks((OPEN, FUNCTION), hidden)  # the model forgets the first tag at times
        mark = yield from reader.until(begins, sink.content)
        while mark:
            start = reader.at
            if mark == OPEN:
                yield from reader.space()
            opened = mark == FUNCTION or (yield from reader.take(FUNCTION))
            if not opened or not (yield from self._call(reader, sink, functions)):
                reader.at = start
                sink.content("" if mark in hidden else mark)
            mark = yield from reader.until(begins, sink.content)

    def _call(self, reader: Reader, sink: Sink, functions: Functions) -> Steps[bool]:
        """Whether a call comes next, of which FUNCTION is read; then it is read to its end."""
        name = yield from reader.word(_NAME)
        if not name or not (yield from reader.take(">")):
            return False
        sink.call(name)
        whole, schema, before = True, functions.get(name, {}), "{"
        while whole:
            yield from reader.space()
            if not (yield from reader.take(PARAMETER)):
                break
            key = yield from reader.word(_NAME)
            if not (yield from reader.take(">")):
                break
            sink.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            whole = yield from _value(reader, sink, _of_key(schema, key))
            before = ", "
        closed = yield from reader.take(FUNCTION_END)
        if whole and (closed or (yield from reader.peek())):
            sink.arguments("{}" if before == "{" else "}")
        yield from reader.space()
        yield from reader.take(CLOSE)
        sink.bound()
        return True

    # ------------------------------------------------------------ writing

    def forced(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        return one_after_another([self._tag(function) for function in functions], "\n", parallel)

    def free(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        return {
            "type": "triggered_tags",
            "triggers": [OPEN],
            "tags": [self._tag(function) for function in functions],
            "stop_after_first": not parallel,
        }

    def _tag(self, function: Function) -> dict[str, Any]:
        arguments = {"json_schema": function.schema, "style": "qwen_xml", "max_whitespace_cnt": MOST_SPACE}
        content = {"type": "json_schema"} | arguments  # which may end with a line's end
        return tag(f"{OPEN}\n{FUNCTION}{function.name}>\n", content, f"{FUNCTION_END}\n{CLOSE}")


def _value(reader: Reader, sink: Sink, schema: Schema) -> Steps[bool]:
    """Read an argument, and the tag that ends it; False if the text ends before. A string goes on as it comes."""
    yield from _line_end(reader)
    ends = marks((PARAMETER_END,))
    if _kinds(schema) - {"string"}:
        found: list[str] = []
        mark = yield from reader.until(ends, found.append)
        sink.arguments(_as_json("".join(found).removesuffix("\n"), schema))
        return bool(mark)
    sink.arguments('"')
    held = ""

    def pass_on(text: str) -> None:
        """All but a line's end, which may be the last."""
        nonlocal held
        text = held + text
        held = "\n" if text.endswith("\n") else ""
        sink.arguments(json.dumps(text.removesuffix("\n"), ensure_ascii=False)[1:-1])

    if not (yield from reader.until(ends, pass_on)):
        return False
    sink.arguments('"')
    return True


def _line_end(reader: Reader) -> Steps[None]:
    if (yield from reader.peek()) == "\n":
        reader.at += 1


# ---------------------------------------------------------------- what a text stands for


def _of_key(schema: Schema, key: str) -> Schema:
    """The schema of an argument, its references resolved; {} where nothing is said of it."""
    found = schema.get("properties", {}).get(key, {}) if isinstance(schema, dict) else {}
    for _ in range(MOST_REFERENCES):
        match = _REFERENCE.fullmatch(found.get("$ref", "")) if isinstance(found, dict) else None
        if not match:
            break
        found = (schema.get("$defs") or schema.get("definitions") or {}).get(match[1], {})
    return found


def _kinds(schema: Schema) -> set[str]:
    """JSON types that a value may have, as far as the schema says it plainly; "any" where it does not."""
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
    """The JSON that a text stands for; a string where it is no JSON of a type that the schema has."""
    kinds = _kinds(schema)
    plain = text.strip()
    if "boolean" in kinds and plain in ("True", "False"):  # as templates write them
        return plain.lower()
    if "null" in kinds and plain in ("None", "null"):
        return "null"
    try:
        value = json.loads(plain)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    if isinstance(value, str) or ("string" in kinds and not isinstance(value, (dict, list))):
        return json.dumps(text, ensure_ascii=False)
    return plain
