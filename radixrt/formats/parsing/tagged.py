"""Arguments of calls between tags, as Qwen3-Coder, GLM, MiniMax and DeepSeek V3.2 write them. The function's schema
tells the type of a value, if it is not written: strings are written without quotes, other types as JSON."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from radixrt.formats.parsing.formats import Functions, Schema, constant, either, read_json, sequence, tag
from radixrt.formats.parsing.pieces import Sink
from radixrt.formats.parsing.reader import Reader, Steps, marks
from radixrt.formats.parsing.writing import AMBIGUOUS, ANY_TEXT, Writer, one_of
from radixrt.requests.schemas.inexact import Inexact

DEFINITIONS = ("$defs", "definitions")
_REFERENCE = re.compile(r"#/(\$defs|definitions)/([^/]+)")
_TAIL = re.compile(r"[^<>\n]")
"""What may be in the rest of a broken tag."""
QUOTED = '">'
"""What comes after a name in quotes."""
MAX_REFERENCES = 16
MAX_EXAMPLE_CHARS = 1 << 13
"""The most characters of a call that is an example in a value: so much is held back until that is known."""
MAX_REPEATS = 4
"""How often the tag after a value may be there."""


@dataclass(frozen=True, slots=True)
class Tags:
    """How arguments, and the calls around them, are written. Of end tags the beginning is named, up to what models
    forget or misspell.

        <function=f>  <parameter=a>    a value  </parameter>  </function>  </tool_call>
        opener    ▲   begin       ▲             end           closes
               opened          between
    """

    begin: str
    between: tuple[str, ...]
    """What comes between an argument's name and its value, in order."""
    end: str
    """The tag after a value."""
    ends: tuple[str, ...]
    """The beginnings of this and of others that models write in its place."""
    closes: tuple[str, ...]
    """That of the tag after the last argument, and of what is around calls, if they have that."""
    opener: str
    opened: tuple[str, ...]
    """What may come after the name of a function, behind `opener`."""
    name: re.Pattern[str]
    """The characters of a name."""
    name_end: str = ""
    """The beginning of the tag after an argument's name, if it has one."""
    lines: bool = False
    """Whether a value is on lines of its own."""
    kinds: tuple[tuple[str, bool], ...] = ()
    """If the type of a value is written, in place of the schema's: (what comes before the value, whether that says that
    it is a string)."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Where a value may end, or seems to."""
        begin = () if self.begin.startswith(self.ends) else (self.begin,)
        return (*self.ends, *begin, *self.closes, self.opener)


def read_arguments(reader: Reader, sink: Sink, schema: Schema, tags: Tags) -> Steps[None]:
    """Read a call's arguments, and the tags that close it, if they are there. The arguments go to the sink as a JSON
    object, which is closed unless the text ends before."""
    whole, before, given = True, "{", set[str]()
    while whole:
        yield from reader.space()
        if not (name := (yield from _name(reader, tags))):
            break
        if (known := (yield from _kind(reader, _of_key(schema, name), tags))) is None:
            break
        sink.arguments(f"{before}{json.dumps(name, ensure_ascii=False)}: ")
        given.add(name)
        whole = yield from _value(reader, sink, known, tags, _names(schema), given)
        before = ", "
    closed = (yield from read_closes(reader, tags.closes[:1])) or (yield from _is_next(reader, tags.closes))
    written = [mark for mark, _ in tags.kinds]
    if closed or (whole and not reader.ends_within((tags.begin, *tags.between, *written, *tags.closes))):
        sink.arguments("{}" if before == "{" else "}")


def read_closes(reader: Reader, closes: tuple[str, ...], found: bool = False) -> Steps[bool]:
    """Read tags with these beginnings, in any number and order; returns whether there were any, or one was `found`
    before."""
    while True:
        start = reader.at
        yield from reader.space()
        if not (close := (yield from _take_any(reader, closes))):
            if not found or not reader.ends_within(closes):
                reader.at = start
            return found
        if not close.endswith(">"):
            yield from _tag_end(reader)
        found = True


def _is_next(reader: Reader, literals: tuple[str, ...]) -> Steps[bool]:
    """Whether one of these comes next, after white space; nothing is read."""
    start = reader.at
    yield from reader.space()
    found = yield from _take_any(reader, literals)
    reader.at = start
    return bool(found)


def begins(reader: Reader, tags: Tags) -> Steps[bool]:
    """Whether an argument or the end of the call comes next, or the text ends; only white space is read."""
    yield from reader.space()
    start, literals = reader.at, (tags.begin, *tags.closes)
    found = bool((yield from _take_any(reader, literals))) or reader.ends_within(literals)
    reader.at = start
    return found


def read_call(reader: Reader, sink: Sink, functions: Functions, tags: Tags) -> Steps[bool]:
    """Read a call whose name is in quotes, if one comes next, and otherwise only white space. Returns whether there was
    one."""
    yield from reader.space()
    start = reader.at
    name = (yield from reader.word(tags.name)) if (yield from reader.take(tags.opener)) else ""
    if not name or not (yield from reader.take(QUOTED)) or not (yield from begins(reader, tags)):
        reader.at = start
        return False
    sink.call(name)
    yield from read_arguments(reader, sink, functions.get(name, {}), tags)
    return True


def _name(reader: Reader, tags: Tags) -> Steps[str]:
    """Read the tags before a value; returns the argument's name, "" if there is none."""
    if not (yield from reader.take(tags.begin)):
        return ""
    return (yield from _begun_name(reader, tags))


def _begun_name(reader: Reader, tags: Tags) -> Steps[str]:
    name = yield from reader.word(tags.name)
    while tags.name_end:
        yield from reader.space()
        if not (yield from reader.take(tags.name_end)):
            break
        yield from _tag_end(reader)
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
            others = kinds(schema) - {"string"}
            return {"type": "string"} if is_string else {} if "any" in others or not others else {"type": [*others]}
    return None


# ---------------------------------------------------------------- where a value ends


def _value(
    reader: Reader, sink: Sink, schema: Schema, tags: Tags, names: Collection[str], given: Collection[str]
) -> Steps[bool]:  # fmt: skip
    """Read a value, and the tag that ends it; False if the text ends before. A string is passed on as it arrives."""
    if tags.lines:
        yield from _line_end(reader)
    last = "\n" * tags.lines
    if kinds(schema) - {"string"}:
        found: list[str] = []
        whole = yield from _text(reader, tags, names, given, found.append)
        sink.arguments(_as_json("".join(found).removesuffix(last), schema))
        return whole
    sink.arguments('"')
    held = ""

    def pass_on(text: str) -> None:
        """Pass on all but a trailing line feed, which may belong to the format."""
        nonlocal held
        text = held + text
        held = last if text.endswith(last) else ""
        sink.arguments(json.dumps(text.removesuffix(held), ensure_ascii=False)[1:-1])

    if not (yield from _text(reader, tags, names, given, pass_on)):
        return False
    sink.arguments('"')
    return True


def _line_end(reader: Reader) -> Steps[None]:
    if (yield from reader.peek()) == "\n":
        reader.at += 1


def _text(
    reader: Reader, tags: Tags, names: Collection[str], given: Collection[str], pass_on: Callable[[str], None]
) -> Steps[bool]:  # fmt: skip
    """Read the text of a value, and the tag that ends it; False if the text ends before.

    A value ends only where another argument, the end of the call or of the text follows: all else that looks like a tag
    is a part of it, and the right tag may be missing, broken, or there twice."""
    while mark := (yield from reader.until(marks(tags.marks), pass_on)):
        start = reader.at - len(mark)
        resume = yield from _literal(reader, tags, mark, names, given)
        if resume is None:
            return True
        reader.at = resume
        pass_on(reader.between(start, resume))
    return False


def _literal(
    reader: Reader, tags: Tags, mark: str, names: Collection[str], given: Collection[str]
) -> Steps[int | None]:  # fmt: skip
    """Decide what a mark in a value is. Returns up to where the text is a part of the value; None if that has ended:
    what ends it is then read, but not what follows, of which the mark may be the beginning."""
    start, end = reader.at - len(mark), reader.at
    if tags.begin.startswith(mark) and (yield from reader.take(tags.begin[len(mark) :])):
        name = yield from _begun_name(reader, tags)
        if not name or name in given or (names and name not in names):
            return end
        reader.at = start
        return None
    if mark in tags.ends:
        return (yield from _after_end(reader, tags, mark))
    if mark in tags.closes:
        decisive = yield from _decisive(reader, tags, end, ())
        if decisive is None:
            reader.at = start
        return decisive
    return (yield from _after_example(reader, tags)) or end


def _after_example(reader: Reader, tags: Tags) -> Steps[int | None]:
    """Up to where a value goes on behind the `opener` of a whole call, which is an example in it; None if the value
    does not, so that the call may be the next one."""
    if not ((yield from reader.word(tags.name)) and (yield from _opened(reader, tags))):
        return None
    closed, place = yield from reader.ahead(marks(tags.closes[:1]), reader.at, MAX_EXAMPLE_CHARS)
    return (yield from _decisive(reader, tags, place + len(closed), ())) if closed else None


def _after_end(reader: Reader, tags: Tags, mark: str) -> Steps[int | None]:
    """`_literal` behind a tag that may end a value."""
    exact = tags.end.startswith(mark) and (yield from reader.take(tags.end[len(mark) :]))
    if not exact:
        yield from _tag_end(reader)
    end = reader.at
    for _ in range(MAX_REPEATS):
        yield from reader.space()
        at, follow = reader.at, (tags.begin, *tags.closes, tags.opener)
        if (yield from _take_any(reader, follow)) or reader.ends_within(follow):
            reader.at = at
            return None
        if not exact or not (yield from reader.take(tags.end)):
            break
    decisive = yield from _decisive(reader, tags, end, tags.closes)
    if decisive is None:
        reader.at = end
    return decisive


def _decisive(reader: Reader, tags: Tags, at: int, more: tuple[str, ...]) -> Steps[int | None]:
    """Where after `at`, in the same call, the next tag is that may end a value or begin an argument, or one of `more`;
    None if there is none."""
    while True:
        mark, place = yield from reader.ahead(marks(tags.marks), at)
        if not mark:
            return None
        at = place + len(mark)
        if mark == tags.opener:
            reader.at = at
            if (yield from reader.word(tags.name)) and (yield from _opened(reader, tags)):
                return None
        elif mark not in tags.closes or mark in more:
            return place


def _opened(reader: Reader, tags: Tags) -> Steps[bool]:
    yield from reader.space()
    return bool((yield from _take_any(reader, tags.opened)))


def _take_any(reader: Reader, literals: tuple[str, ...]) -> Steps[str]:
    """Read one of these if it comes next; returns which, "" if none does."""
    for literal in literals:
        if (yield from reader.take(literal)):
            return literal
    return ""


def _tag_end(reader: Reader) -> Steps[None]:
    """Read the rest of a tag, which may be broken."""
    yield from reader.word(_TAIL)
    yield from reader.take(">")


# ---------------------------------------------------------------- writing


@dataclass(frozen=True, slots=True)
class Written:
    """How a grammar has arguments written: begin, name, middle, value, end. `of_json`: the middle before what is no
    string, where that is told."""

    begin: str
    middle: str
    end: str
    name: re.Pattern[str]
    of_json: str = ""

    def arguments(self, schema: Schema) -> dict[str, Any]:
        """See `formats.ToolFormat`."""
        return _Writer(schema, self).written()


class _Writer(Writer):
    def __init__(self, schema: Schema, tags: Written) -> None:
        super().__init__(schema)
        self._tags = tags
        self.name = tags.name

    def member(self, name: str | None, more: dict[str, Any], value: Any, path: tuple[str | int, ...]) -> dict[str, Any]:
        tags, own = self._tags, _of_key(self.given, name) if name is not None else {}
        branches = [*self.branches(value, path)]
        told = bool(tags.of_json)
        texts = self._texts(branches, own, told, path)
        others = self._others(branches, own, told)
        if not texts and not others:
            raise Inexact(path, f"is of values that {AMBIGUOUS}")
        forms = [tag(tags.middle, form, tags.end) for form in texts]
        forms += [tag(tags.of_json or tags.middle, form, tags.end) for form in others]
        if name is None:
            return sequence(constant(tags.begin), more, one_of(forms))
        return one_of([form | {"begin": f"{tags.begin}{name}{form['begin']}"} for form in forms])

    def _texts(self, branches: list[Any], own: Schema, told: bool, path: tuple[str | int, ...]) -> list[dict[str, Any]]:
        """The strings among the values; if it is not `told` that they are, those that are read as such."""
        if any(one in ({}, True) for one in branches):
            return [ANY_TEXT]
        words = [word for one in branches for word in one.get("enum", ()) if isinstance(word, str)]
        forms = [constant(word) for word in words if word and "<" not in word and (told or _reads(word, own) == word)]
        if "" in words and (told or _reads("", own) == ""):
            forms.append(constant(""))
        known = {"string"} if told else kinds(own)
        for one in branches:
            if one.get("type") == "string":
                forms.append(self._text(one, branches, known, path))
        return forms

    def _text(self, schema: dict[str, Any], branches: list[Any], known: set[str], path: tuple[str | int, ...]) -> Any:
        if known == {"string"}:
            return self.text(schema, path)
        present = {str(one.get("type")) for one in branches} | {
            "null" for one in branches if None in one.get("enum", ())
        }
        if "any" in known or known & {"null", "boolean"} - present:
            raise Inexact(path, f"is of strings and others that {AMBIGUOUS}")
        if not known & {"array", "object"}:
            return self.text(schema, path)
        if schema != {"type": "string"}:
            raise Inexact(path, f"is of strings and others that {AMBIGUOUS}")
        return either(constant(""), sequence({"type": "regex", "pattern": r"[^ \t\n\r\f\v\[{<]"}, ANY_TEXT))

    def _others(self, branches: list[Any], own: Schema, told: bool) -> list[dict[str, Any]]:
        """The values that are no strings, as JSON; if it is not `told`, those that are not read as strings."""
        forms = []
        scalars_are_texts = not told and "string" in kinds(own)
        for one in branches:
            if one in ({}, True):
                forms += [self.json(one)] * told
            elif "enum" in one:
                values = [value for value in one["enum"] if not isinstance(value, str)]
                texts = [
                    text for value in values for text in _texts_of(value) if told or _same(_reads(text, own), value)
                ]
                forms += [constant(text) for text in dict.fromkeys(texts)]
            elif one["type"] in ("integer", "number"):
                forms += [] if scalars_are_texts else [self.json(one)]
            elif one["type"] != "string":
                forms.append(self.json(one))
        return forms


def _texts_of(value: Any) -> list[str]:
    """How a constant may be written."""
    return [json.dumps(value, ensure_ascii=False), *([str(value)] if isinstance(value, bool) else [])]


def _reads(text: str, schema: Schema) -> Any:
    """What a text is read as."""
    return text if kinds(schema) == {"string"} else json.loads(_as_json(text, schema))


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


# ---------------------------------------------------------------- what a text stands for


def _of_key(schema: Schema, key: str) -> Schema:
    """The schema of an argument, with the definitions that it may refer to; {} if there is none."""
    if not isinstance(schema, dict):
        return {}
    found = (schema.get("properties") or {}).get(key, {})
    return {**_definitions(schema), **found} if isinstance(found, dict) else {}


def _names(schema: Schema) -> Collection[str]:
    """The arguments that the schema defines."""
    return schema.get("properties") or () if isinstance(schema, dict) else ()


def _definitions(schema: dict[str, Any]) -> dict[str, Any]:
    return {word: schema[word] for word in DEFINITIONS if word in schema}


def kinds(schema: Schema) -> set[str]:
    """The JSON types that a value may have, as far as the schema states them, itself or in definitions that it holds;
    otherwise "any"."""
    return _kinds(schema, _definitions(schema), MAX_REFERENCES) if isinstance(schema, dict) else {"any"}


def _kinds(schema: Schema, definitions: dict[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, dict) or not depth:
        return {"any"}
    if kind := schema.get("type"):
        return {kind} if isinstance(kind, str) else set(kind)
    if match := _REFERENCE.fullmatch(str(schema.get("$ref", ""))):
        return _kinds((definitions.get(match[1]) or {}).get(match[2], {}), definitions, depth - 1)
    for word in ("anyOf", "oneOf"):
        if parts := schema.get(word):
            return set().union(*(_kinds(part, definitions, depth - 1) for part in parts))
    if parts := schema.get("allOf"):
        found = [_kinds(part, definitions, depth - 1) for part in parts]
        return set.intersection(*(some for some in found if some != {"any"}) or [{"any"}]) or {"any"}
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    return {"string" if isinstance(value, str) else "any" for value in values} or {"any"}


def _as_json(text: str, schema: Schema) -> str:
    """The JSON of a text; a string if it is not JSON of a type that the schema allows."""
    allowed = kinds(schema)
    plain = text.strip()
    if "boolean" in allowed and plain in ("True", "False"):  # templates write them so
        return plain.lower()
    if "null" in allowed and plain in ("None", "null"):
        return "null"
    try:
        value = read_json(plain)
    except ValueError:
        return _of_python(plain, allowed) or json.dumps(text, ensure_ascii=False)
    if isinstance(value, str) or ("string" in allowed and not allowed & _CONTAINERS.get(type(value), set())):
        return json.dumps(text, ensure_ascii=False)
    return plain


_CONTAINERS: dict[type, set[str]] = {dict: {"object", "any"}, list: {"array", "any"}}


def _of_python(text: str, allowed: set[str]) -> str:
    """The JSON of a list or dictionary in Python syntax, as templates of Qwen3-Coder and Seed-OSS show such arguments
    to the model; "" if it is none, or the schema does not allow the type."""
    if text[:1] not in ("[", "{") or not allowed & {"array", "object", "any"}:
        return ""
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return ""
