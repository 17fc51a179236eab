"""Whether the keywords of a JSON schema have values that they may have, and which are not served at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from radixrt.requests.schemas.inexact import Inexact, Part, place

TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")  # no NaN either


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _are_named(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _are_types(value: Any) -> bool:
    kinds = value if isinstance(value, list) else [value]
    return bool(kinds) and all(isinstance(kind, str) and kind in TYPES for kind in kinds)


SCHEMA, SCHEMAS, NAMED = (
    (_is_schema, "a schema"), (_are_schemas, "a list of schemas"), (_are_named, "an object of schemas")
)  # fmt: skip
NUMBER, COUNT = (_is_number, "a number"), (_is_count, "a whole number of at least 0")
TEXT = (lambda x: isinstance(x, str), "a string")
ANY = (lambda _: True, "")
Shape = tuple[Callable[[Any], bool], str]
SHAPES: dict[str, Shape] = {
    "$ref": TEXT,
    "additionalItems": SCHEMA,
    "additionalProperties": SCHEMA,
    "allOf": SCHEMAS,
    "anyOf": SCHEMAS,
    "contains": SCHEMA,
    "enum": (lambda x: isinstance(x, list) and bool(x), "a list of values"),
    "exclusiveMaximum": (lambda x: isinstance(x, bool) or _is_number(x), "a number"),
    "exclusiveMinimum": (lambda x: isinstance(x, bool) or _is_number(x), "a number"),
    "format": TEXT,
    "items": (lambda x: _is_schema(x) or isinstance(x, list) and all(map(_is_schema, x)), "a schema"),
    "maxContains": COUNT,
    "maxItems": COUNT,
    "maxLength": COUNT,
    "maxProperties": COUNT,
    "maximum": NUMBER,
    "minContains": COUNT,
    "minItems": COUNT,
    "minLength": COUNT,
    "minProperties": COUNT,
    "minimum": NUMBER,
    "multipleOf": NUMBER,
    "not": SCHEMA,
    "oneOf": SCHEMAS,
    "pattern": TEXT,
    "patternProperties": NAMED,
    "prefixItems": SCHEMAS,
    "properties": NAMED,
    "propertyNames": SCHEMA,
    "required": (_are_names, "a list of names"),
    "type": (_are_types, f"of {', '.join(TYPES)}"),
    "unevaluatedItems": SCHEMA,
    "unevaluatedProperties": SCHEMA,
    "uniqueItems": (lambda x: isinstance(x, bool), "true or false"),
}
REFUSED = (
    "$dynamicRef", "$recursiveRef", "dependencies", "dependentRequired", "dependentSchemas", "if", "not",
)  # fmt: skip
COMBINED = ("$ref", "allOf", "anyOf", "oneOf")
UNEVALUATED = {"unevaluatedItems": ("items", "additionalItems"), "unevaluatedProperties": ("additionalProperties",)}


def check(part: Part) -> None:
    """Raise Inexact if a schema, apart from those within it, is malformed or has a keyword that is not served."""
    schema, path = part
    assert isinstance(schema, dict)
    for key in schema.keys() & SHAPES.keys():
        fits, what = SHAPES[key]
        if not fits(schema[key]):
            raise Inexact((*path, key), f"must be {what}")
    for key in REFUSED:
        if key in schema and not _asks_nothing(key, schema):
            raise Inexact((*path, key), "cannot be enforced")
    for key, others in UNEVALUATED.items():
        if schema.get(key, True) not in (True, {}) and any(word in schema for word in COMBINED):
            if not any(word in schema for word in others):
                raise Inexact((*path, key), f"cannot be enforced beside {', '.join(COMBINED)}")


def _asks_nothing(key: str, schema: dict[str, Any]) -> bool:
    if key == "if":
        return "then" not in schema and "else" not in schema
    if key == "not":
        return schema[key] is False or schema[key] in (True, {})  # of the latter, `rewrite` makes a schema of no value
    return not schema[key]


# ---------------------------------------------------------------- what is malformed

Path = tuple[str | int, ...]
_FORMS = SHAPES | {"$defs": NAMED, "definitions": NAMED}
MAX_KEYS = 128
"""The most keys from the root to a schema."""


class Malformed(NamedTuple):
    """A value that is none of its keyword's, or no schema where one should be."""

    path: Path
    """The keys from the root to it."""
    what: str
    """What it must be."""
    value: Any

    @property
    def place(self) -> str:
        """A JSON pointer to it."""
        return place(self.path)

    @property
    def why(self) -> str:
        return f"must be {self.what}, not {self.value!r:.100}"


def well_formed(schema: Any) -> tuple[Any, list[Malformed]]:
    """(a schema with neither the keywords whose values are malformed, nor anything where a schema should be and is
    none; what is left out). Raises Inexact if it is nested too deeply."""
    found: list[Malformed] = []
    return _well_formed(schema, (), found), found


def _well_formed(schema: Any, path: Path, found: list[Malformed]) -> Any:
    if len(path) > MAX_KEYS:
        raise Inexact(path[:MAX_KEYS], "is nested too deeply")
    if not _is_schema(schema):
        found.append(Malformed(path, "a schema", schema))
        return {}
    if isinstance(schema, bool):
        return schema
    return {key: made for key, value in schema.items() for made in _kept(key, value, path, found)}


def _kept(key: str, value: Any, path: Path, found: list[Malformed]) -> Iterator[Any]:
    """The well-formed value of a keyword, if there is any."""
    at = (*path, key)
    fits, what = _FORMS.get(key, ANY)
    holds = isinstance(value, dict) if (fits, what) == NAMED else isinstance(value, list) and bool(value)
    if (fits, what) == NAMED and holds:
        yield {name: _well_formed(inner, (*at, name), found) for name, inner in value.items()}
    elif ((fits, what) == SCHEMAS or key == "items") and holds:
        yield [_well_formed(inner, (*at, i), found) for i, inner in enumerate(value)]
    elif not fits(value):
        found.append(Malformed(at, what, value))
    else:
        yield _well_formed(value, at, found) if (fits, what) == SCHEMA or key == "items" and value != [] else value
