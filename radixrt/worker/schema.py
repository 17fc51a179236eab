"""JSON schemas, made fit for a grammar of JSON.

xgrammar lets any value stand where a schema has several in `allOf`: objects among them are made one here.

It puts a `pattern` between quotes as it is: where it lets any character stand (`.`, `[^a]`, `\\S`), a raw quote or line
break could, and what came out would be no JSON. Those are left out; where one must stand it is escaped as in JSON.
"""

from __future__ import annotations

import json
import re
from typing import Any

from radixrt.schema_keywords import DATA, DEFINED, NAMED

SAID = frozenset({"title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id"})
"""Keywords that a value need not follow."""
OF_OBJECTS = DEFINED | {"type", "properties", "required", "additionalProperties"}
NAME = re.compile(r"#(?:/(\$defs|definitions)/([^/]+))?")
"""References that mean the same when what they stand in is moved."""
DEPTH = 64
"""Of objects and lists within each other."""
MOST_WITHIN = 16
"""Schemas in `allOf` within each other, and references between them."""
MOST_PARTS = 20_000
"""Of a schema: what is looked at to make objects one, and what comes of it."""
UNSAFE = r"\"\\\n\r"
"""Within a class of characters."""
ESCAPE = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)"
CONTROLS = {"\\0": "\0", "\\t": "\t", "\\n": "\n", "\\v": "\v", "\\f": "\f", "\\r": "\r"}
PIECE = re.compile(
    rf"""(?P<escape>{ESCAPE})      # outside of a class
      | (?P<any>\.)
      | (?P<quote>")
      | (?P<negated>\[\^)
      | (?P<set>\[(?:\\.|[^\]\\])*\]?)""",
    re.VERBOSE | re.DOTALL,
)


def made_fit(kind: str, text: str) -> str:
    """The text of a json_schema or structural_tag, its patterns as `safe_pattern` makes them, and objects that a value
    must all be as one."""
    if '"pattern"' not in text and '"allOf"' not in text:
        return text
    value = json.loads(text)
    return json.dumps(_schema(value) if kind == "json_schema" else _tag(value), ensure_ascii=False)


def _schema(root: Any) -> Any:
    if (made := _made_one(root)) is not None:
        return made
    return _Patterns().fit(root)


class _Patterns:
    """A schema, and what it holds, with safe patterns."""

    def fit(self, value: Any) -> Any:
        """A part of it, made fit."""
        if isinstance(value, list):
            return [self.fit(inner) for inner in value]
        if not isinstance(value, dict):
            return value
        changed = {key: self._inner(key, inner) for key, inner in value.items()}
        if isinstance(pattern := value.get("pattern"), str):
            changed["pattern"] = safe_pattern(pattern)
        return changed

    def _inner(self, keyword: str, value: Any) -> Any:
        """What a schema has under a keyword."""
        if keyword in NAMED and isinstance(value, dict):
            return {name: self.fit(inner) for name, inner in value.items()}
        return value if keyword in DATA else self.fit(value)


def _tag(value: Any) -> Any:
    """A structural tag has patterns of its own, of free text: only schemas within are changed."""
    if isinstance(value, list):
        return [_tag(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    return {key: _schema(inner) if key == "json_schema" else _tag(inner) for key, inner in value.items()}


# ---------------------------------------------------------------- allOf


def _made_one(root: Any) -> Any:
    """A schema in which objects that a value must all be are one, and patterns safe; None where there are none, or this
    is not known to be the same."""
    if not isinstance(root, dict) or not isinstance(root.get("$defs", {}), dict) or not _is_plain(root, DEPTH):
        return None
    schema = _AllOf(root)
    try:
        made = schema.fit(root)
    except (_TooLarge, RecursionError):
        return None
    return made | {"$defs": made.get("$defs", {}) | schema.made} if schema.made else None


def _is_plain(value: Any, depth: int) -> bool:
    """Whether all references are to what a schema defines by name, and it is not too deep."""
    if isinstance(value, dict):
        ref = value.get("$ref")
        if isinstance(ref, str) and not NAME.fullmatch(ref):
            return False
        inner = [inner for key, inner in value.items() if key not in DATA | NAMED]
        value = inner + [[*named.values()] if isinstance(named, dict) else named for named in map(value.get, NAMED)]
    return not isinstance(value, list) or (depth > 0 and all(_is_plain(inner, depth - 1) for inner in value))


class _TooLarge(Exception):
    """What comes of a schema is larger than it is worth."""


class _AllOf(_Patterns):
    """Each object that is made of several is defined once, by a name of its own, which stands where they stood."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.made: dict[str, Any] = {}
        self._root = root
        self._names: dict[int, str] = {}
        """By identity of the schema that has the `allOf`."""
        self._left = MOST_PARTS

    def fit(self, value: Any) -> Any:
        """See _Patterns."""
        self._left -= 1
        if self._left < 0:
            raise _TooLarge
        if not isinstance(value, dict) or not _has_several(value):
            return super().fit(value)
        if id(value) not in self._names:
            if (one := _one(self._objects(value, MOST_WITHIN))) is None:
                return super().fit(value)
            name = f"all of {len(self._names)}"
            while name in self._root.get("$defs", {}):
                name += "'"
            self._names[id(value)] = name
            self.made[name] = super().fit(one)
        kept = {key: self._inner(key, value[key]) for key in DEFINED & value.keys()}
        return kept | {"$ref": f"#/$defs/{self._names[id(value)]}"}

    def _objects(self, schema: Any, within: int) -> list[dict[str, Any]] | None:
        """What a value must be, by all that a schema says: schemas of objects. None where there are others among them,
        or too many."""
        self._left -= 1
        if not isinstance(schema, dict) or self._left < 0:
            return None
        own = {key: inner for key, inner in schema.items() if key not in ("allOf", "$ref")}
        found = [own] if own.keys() - SAID - DEFINED else []
        inner = schema.get("allOf", [])
        if (found and not _is_object(own)) or not isinstance(inner, list):
            return None
        for part in [*inner, *([self._referred(schema["$ref"])] if "$ref" in schema else [])]:
            more = self._objects(part, within - 1) if within else None
            if more is None:
                return None
            found += more
        return found

    def _referred(self, ref: Any) -> Any:
        """What a reference is to; None if it is to nothing, or to all."""
        place = NAME.fullmatch(ref) if isinstance(ref, str) else None
        if place is None or place[1] is None:
            return None
        defined = self._root.get(place[1])
        return defined.get(place[2].replace("~1", "/").replace("~0", "~")) if isinstance(defined, dict) else None


def _has_several(schema: dict[str, Any]) -> bool:
    """Whether there is more than one that a value must be."""
    parts = schema.get("allOf")
    return isinstance(parts, list) and len(parts) + bool(OF_OBJECTS & schema.keys() - DEFINED) > 1


def _is_object(schema: dict[str, Any]) -> bool:
    """Whether it is of objects, says nothing but what can be made one, and is well-formed."""
    required = schema.get("required", [])
    return (
        schema.keys() <= SAID | OF_OBJECTS
        and schema.get("type", "object") == "object"
        and isinstance(schema.get("properties", {}), dict)
        and isinstance(required, list)
        and all(isinstance(name, str) for name in required)
    )


def _one(parts: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    """The schema of what is all of some objects: it has the properties of each, and is closed if one of them is. None
    where they differ in what a property is, or in what others may be, and without any."""
    properties: dict[str, Any] = {}
    required: dict[str, None] = {}
    whole: dict[str, Any] = {"type": "object"}
    for part in parts or ():
        for name, schema in part.get("properties", {}).items():
            if properties.setdefault(name, schema) != schema:
                return None
        required |= dict.fromkeys(part.get("required", []))
        others = part.get("additionalProperties", True)
        if others is False:
            whole["additionalProperties"] = False
        elif others is not True:
            return None
    return whole | {"properties": properties, "required": [*required]} if parts else None


# ---------------------------------------------------------------- patterns


def safe_pattern(pattern: str) -> str:
    """The pattern of what stands between the quotes of a JSON string, less what would have to be escaped there."""
    found, at = [], 0
    while match := PIECE.search(pattern, at):
        found += [pattern[at : match.start()], _safe(match)]
        at = match.end()
        if match.lastgroup == "negated":
            inside = re.compile(r"(?:\\.|[^\]\\])*\]?", re.DOTALL).match(pattern, at)
            found.append(inside[0])
            at = inside.end()
    return "".join(found) + pattern[at:]


def _safe(match: re.Match[str]) -> str:
    piece = match[0]
    match match.lastgroup:
        case "any":
            return f"[^{UNSAFE}]"
        case "negated":
            return f"[^{UNSAFE}"
        case "set":
            escaped = [_escaped(one[0]) for one in re.finditer(rf"{ESCAPE}|.", piece[1:-1], re.DOTALL)]
            return f"({'|'.join(escaped)})" if escaped and all(escaped) else piece
    if escaped := _escaped(piece):
        return f"({escaped})"  # what repeats it repeats all of it
    named = {r"\S": rf"[^{UNSAFE}\s]", r"\D": rf"[^{UNSAFE}\d]", r"\W": rf"[^{UNSAFE}\w]"}
    return named.get(piece, piece)


def _escaped(piece: str) -> str:
    """As a pattern, what JSON writes for the character that a piece of a pattern stands for; "" where that is the
    character itself, or the piece stands for several."""
    code = piece[2:]
    char = chr(int(code, 16)) if code else CONTROLS.get(piece, piece[-1])
    known = code or piece in CONTROLS or not piece[-1].isalnum()
    written = json.dumps(char, ensure_ascii=False)[1:-1]
    return written.replace("\\", r"\\") if known and written != char else ""
