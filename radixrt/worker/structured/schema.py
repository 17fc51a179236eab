"""Rewrites JSON schemas to work around two gaps of xgrammar.

It allows any value where a schema has several schemas in `allOf`. Here object schemas in `allOf` are merged into one.

It copies a `pattern` between quotes as it is. Where the pattern allows any character (`.`, `[^a]`, `\\S`), the text
could have a raw quote or line break, and would not be JSON. Here such characters are excluded from the pattern, or
escaped as in JSON where the pattern requires one.
"""

from __future__ import annotations

import json
import re
from typing import Any

from radixrt.requests.schema_keywords import DATA, DEFINED, NAMED

ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id"})
"""Keywords that do not constrain a value."""
OBJECT_KEYWORDS = DEFINED | {"type", "properties", "required", "additionalProperties"}
NAME = re.compile(r"#(?:/(\$defs|definitions)/([^/]+))?")
"""References that keep their meaning when the schema around them is moved."""
DEPTH = 64
"""The deepest nesting of objects and lists in a schema that is rewritten."""
MAX_MERGE_DEPTH = 16
"""The deepest nesting of `allOf` and references between them."""
MAX_PARTS = 20_000
"""The most parts of a schema that are visited or written to merge objects."""
UNSAFE = r"\"\\\n\r"
"""Characters that JSON strings escape, as written within a character class."""
SET_REST = re.compile(r"(?:\\.|[^\]\\])*\]?", re.DOTALL)
"""The rest of a set of characters."""
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


def adapt_schema(kind: str, text: str) -> str:
    """Rewrite the text of a json_schema or structural_tag: its patterns by `safe_pattern`, object schemas in `allOf`
    merged."""
    if '"pattern"' not in text and '"allOf"' not in text:
        return text
    value = json.loads(text)
    return json.dumps(_schema(value) if kind == "json_schema" else _tag(value), ensure_ascii=False)


def _schema(root: Any) -> Any:
    if (made := _merged(root)) is not None:
        return made
    return _Patterns().fit(root)


class _Patterns:
    """Rewrites the patterns of a schema, recursively."""

    def fit(self, value: Any) -> Any:
        """Rewrite a schema or a list of schemas."""
        if isinstance(value, list):
            return [self.fit(inner) for inner in value]
        if not isinstance(value, dict):
            return value
        changed = {key: self._inner(key, inner) for key, inner in value.items()}
        if isinstance(pattern := value.get("pattern"), str):
            changed["pattern"] = safe_pattern(pattern)
        return changed

    def _inner(self, keyword: str, value: Any) -> Any:
        """Rewrite the value of a keyword."""
        if keyword in NAMED and isinstance(value, dict):
            return {name: self.fit(inner) for name, inner in value.items()}
        return value if keyword in DATA else self.fit(value)


def _tag(value: Any) -> Any:
    """Rewrite the schemas in a structural tag. Its own patterns are for free text, and stay as they are."""
    if isinstance(value, list):
        return [_tag(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    return {key: _schema(inner) if key == "json_schema" else _tag(inner) for key, inner in value.items()}


# ---------------------------------------------------------------- allOf


def _merged(root: Any) -> Any:
    """A schema with merged `allOf` and safe patterns; None if it cannot be rewritten with certainty."""
    if not isinstance(root, dict) or not isinstance(root.get("$defs", {}), dict) or not _is_plain(root, DEPTH):
        return None
    schema = _AllOf(root)
    try:
        made = schema.fit(root)
    except (_TooLarge, RecursionError):
        return None
    return made | {"$defs": made.get("$defs", {}) | schema.made} if schema.made else None


def _is_plain(value: Any, depth: int) -> bool:
    """Whether all references are by name (NAME), and the schema is not too deep."""
    if isinstance(value, dict):
        ref = value.get("$ref")
        if isinstance(ref, str) and not NAME.fullmatch(ref):
            return False
        inner = [inner for key, inner in value.items() if key not in DATA | NAMED]
        value = inner + [[*named.values()] if isinstance(named, dict) else named for named in map(value.get, NAMED)]
    return not isinstance(value, list) or (depth > 0 and all(_is_plain(inner, depth - 1) for inner in value))


class _TooLarge(Exception):
    """The merged schema would have more than MAX_PARTS parts."""


class _AllOf(_Patterns):
    """Merges object schemas in `allOf`. Each merged schema is defined once, in `made`, and a reference takes the place
    of the schemas it was merged from."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.made: dict[str, Any] = {}
        self._root = root
        self._names: dict[int, str] = {}
        """By id() of the schema with the `allOf`."""
        self._left = MAX_PARTS

    def fit(self, value: Any) -> Any:
        """See _Patterns."""
        self._left -= 1
        if self._left < 0:
            raise _TooLarge
        if not isinstance(value, dict) or not _needs_merge(value):
            return super().fit(value)
        if id(value) not in self._names:
            if (one := _merge_objects(self._objects(value, MAX_MERGE_DEPTH))) is None:
                return super().fit(value)
            name = f"all of {len(self._names)}"
            while name in self._root.get("$defs", {}):
                name += "'"
            self._names[id(value)] = name
            self.made[name] = super().fit(one)
        kept = {key: self._inner(key, value[key]) for key in DEFINED & value.keys()}
        return kept | {"$ref": f"#/$defs/{self._names[id(value)]}"}

    def _objects(self, schema: Any, within: int) -> list[dict[str, Any]] | None:
        """The object schemas that a schema requires a value to satisfy at once, from itself, its `allOf` and its
        reference. None if some are not of objects, or there are too many."""
        self._left -= 1
        if not isinstance(schema, dict) or self._left < 0:
            return None
        keywords = {key: inner for key, inner in schema.items() if key not in ("allOf", "$ref")}
        objects = [keywords] if keywords.keys() - ANNOTATIONS - DEFINED else []
        inner = schema.get("allOf", [])
        if (objects and not _is_object(keywords)) or not isinstance(inner, list):
            return None
        for part in [*inner, *([self._referred(schema["$ref"])] if "$ref" in schema else [])]:
            more = self._objects(part, within - 1) if within else None
            if more is None:
                return None
            objects += more
        return objects

    def _referred(self, ref: Any) -> Any:
        """The schema that a reference names; None if there is no such, or it is the whole schema."""
        place = NAME.fullmatch(ref) if isinstance(ref, str) else None
        if place is None or place[1] is None:
            return None
        defined = self._root.get(place[1])
        return defined.get(place[2].replace("~1", "/").replace("~0", "~")) if isinstance(defined, dict) else None


def _needs_merge(schema: dict[str, Any]) -> bool:
    """Whether a value must satisfy more than one schema: those in `allOf` and the schema's own keywords."""
    parts = schema.get("allOf")
    return isinstance(parts, list) and len(parts) + bool(OBJECT_KEYWORDS & schema.keys() - DEFINED) > 1


def _is_object(schema: dict[str, Any]) -> bool:
    """Whether a schema is a well-formed one of objects, with only those keywords that can be merged."""
    required = schema.get("required", [])
    return (
        schema.keys() <= ANNOTATIONS | OBJECT_KEYWORDS
        and schema.get("type", "object") == "object"
        and isinstance(schema.get("properties", {}), dict)
        and isinstance(required, list)
        and all(isinstance(name, str) for name in required)
    )


def _merge_objects(parts: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    """Merge object schemas: the result has all their properties, and no others if one of them forbids others. None if
    there are none, if they define a property differently, or if one has a schema for additional properties."""
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
    """Rewrite a pattern so that it matches the text between the quotes of a JSON string: characters that have to be
    escaped there are excluded, or matched as their escapes."""
    pieces: list[str] = []
    at = 0
    while match := PIECE.search(pattern, at):
        pieces += [pattern[at : match.start()], _safe(match)]
        at = match.end()
        if match.lastgroup == "negated" and (inside := SET_REST.match(pattern, at)):
            pieces.append(inside[0])
            at = inside.end()
    return "".join(pieces) + pattern[at:]


def _safe(match: re.Match[str]) -> str:
    piece = match[0]
    match match.lastgroup:
        case "any":
            return f"[^{UNSAFE}]"
        case "negated":
            return f"[^{UNSAFE}"
        case "set":
            each = [_escaped(one[0]) for one in re.finditer(rf"{ESCAPE}|.", piece[1:-1], re.DOTALL)]
            return f"({'|'.join(each)})" if each and all(each) else piece
    if escaped := _escaped(piece):
        return f"({escaped})"  # grouped, so that a quantifier after it applies to all of it
    named = {r"\S": rf"[^{UNSAFE}\s]", r"\D": rf"[^{UNSAFE}\d]", r"\W": rf"[^{UNSAFE}\w]"}
    return named.get(piece, piece)


def _escaped(piece: str) -> str:
    """A pattern of the JSON escape of the character that a piece of a pattern matches; "" if JSON does not escape it,
    or the piece matches several."""
    code = piece[2:]
    char = chr(int(code, 16)) if code else CONTROLS.get(piece, piece[-1])
    known = code or piece in CONTROLS or not piece[-1].isalnum()
    written = json.dumps(char, ensure_ascii=False)[1:-1]
    return written.replace("\\", r"\\") if known and written != char else ""
