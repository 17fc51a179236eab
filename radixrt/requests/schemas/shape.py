"""Whether the keywords of a JSON schema have values that they may have, and which are not served at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from radixrt.requests.schemas.inexact import Inexact, Part


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _are_named(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


SCHEMA, SCHEMAS, NAMED = (
    (_is_schema, "a schema"), (_are_schemas, "a list of schemas"), (_are_named, "an object of schemas")
)  # fmt: skip
NUMBER, COUNT = (_is_number, "a number"), (_is_count, "a whole number of at least 0")
TEXT = (lambda x: isinstance(x, str), "a string")
Shape = tuple[Callable[[Any], bool], str]
SHAPES: dict[str, Shape] = {
    "$ref": TEXT,
    "additionalItems": SCHEMA,
    "additionalProperties": SCHEMA,
    "allOf": SCHEMAS,
    "anyOf": SCHEMAS,
    "contains": SCHEMA,
    "enum": (lambda x: isinstance(x, list) and bool(x), "a list of values"),
    "exclusiveMaximum": (lambda x: isinstance(x, int | float), "a number"),
    "exclusiveMinimum": (lambda x: isinstance(x, int | float), "a number"),
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
    "type": (lambda x: isinstance(x, str) or _are_names(x), "the name of a type or a list of them"),
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
