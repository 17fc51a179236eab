"""What JSON Schema's keywords ask of one value of one type: conjunctions of schemas, by type, without combinators.

parts of {"type": ["string", "null"], "minLength": 1}  --of_type-->  Null(), String(least=1)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any

from radixrt.requests.schemas.formats import ENFORCED, PATTERNS, UNSERVED
from radixrt.requests.schemas.inexact import Inexact, Part
from radixrt.requests.schemas.patterns import Node, Unsupported, first_text, matches, parsed
from radixrt.requests.schemas.shape import TYPES

Parts = tuple[Part, ...]
OF_TYPE = {
    "object": {
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
        "maxProperties", "unevaluatedProperties", "dependentRequired", "dependentSchemas", "dependencies",
    },
    "array": {
        "items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains", "minContains",
        "maxContains", "unevaluatedItems",
    },
    "string": {"pattern", "minLength", "maxLength", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}  # fmt: skip
"""Keywords that only ask something of values of a type."""
LARGEST = (1 << 63) - 1


@dataclass(slots=True)
class Values:
    """One of some values; also booleans and null."""

    values: list[Any]


@dataclass(slots=True)
class Number:
    whole: bool
    low: Fraction | None = None
    high: Fraction | None = None
    open_low: bool = False
    open_high: bool = False
    multiple: int = 0
    path: tuple[str | int, ...] = ()
    """Of `multipleOf`."""


@dataclass(slots=True)
class String:
    patterns: list[tuple[Node, Part]] = field(default_factory=list)
    format: str = ""
    least: int = 0
    most: int | None = None
    path: tuple[str | int, ...] = ()


@dataclass(slots=True)
class Array:
    prefix: list[Parts]
    rest: Parts
    least: int = 0
    most: int | None = None
    unique: tuple[str | int, ...] | None = None


@dataclass(slots=True)
class Object:
    properties: dict[str, Parts]
    required: dict[str, None]
    others: Parts | None
    """Of further properties; None: whoever reads may find some, but none is written."""
    patterns: list[tuple[Node, Parts]]
    names: Parts = ()
    """Of all names."""
    least: int = 0
    most: int | None = None
    path: tuple[str | int, ...] = ()


Rule = Values | Number | String | Array | Object


def whole(value: Any) -> bool:
    """Whether a value is a number without a fraction."""
    return isinstance(value, int) and not isinstance(value, bool) or (isinstance(value, float) and value.is_integer())


def type_of(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case None:
            return "null"
        case int() | float():
            return "integer" if whole(value) else "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def types_of(parts: list[Part], guess: bool) -> tuple[str, ...]:
    """The types that schemas allow. If none says so and `guess`, the one that all their keywords are for."""
    found = set(TYPES)
    named = False
    for schema, _ in parts:
        if "type" in schema:  # type: ignore[operator]
            kinds = schema["type"]  # type: ignore[index]
            named = True
            kinds = set(kinds if isinstance(kinds, list) else [kinds])
            found &= kinds | ({"integer"} if "number" in kinds else set())
    if not named and guess:
        keys = {key for part in parts for key in part.schema}  # type: ignore[attr-defined]
        kinds = [kind for kind, own in OF_TYPE.items() if own & keys]
        if len(kinds) == 1:
            found = set(kinds)
    if "number" in found:
        found.discard("integer")
    return tuple(kind for kind in TYPES if kind in found)


# ---------------------------------------------------------------- numbers and strings


def number(parts: list[Part], is_whole: bool) -> Number | None:
    """None if there is no such number."""
    made = Number(is_whole)
    factors = []
    for schema, path in parts:
        for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if (bound := schema.get(key)) is None or bound is False:  # type: ignore[attr-defined]
                continue
            beyond = key.startswith("exclusive")
            if bound is True:  # as of draft 4
                bound = schema.get(key[9:].lower())  # type: ignore[attr-defined]
                if bound is None:
                    continue
            at = Fraction(Decimal(repr(bound)))
            if key.lower().endswith("minimum"):
                if made.low is None or (at, beyond) > (made.low, made.open_low):
                    made.low, made.open_low = at, beyond
            elif made.high is None or (-at, beyond) > (-made.high, made.open_high):
                made.high, made.open_high = at, beyond
        if "multipleOf" in schema:  # type: ignore[operator]
            factors.append(Fraction(Decimal(repr(schema["multipleOf"]))))  # type: ignore[index]
            made.path = (*path, "multipleOf")
    for factor in factors:
        if factor <= 0:
            raise Inexact(made.path, "must be above 0")
        made.whole = made.whole or factor.denominator == 1
    if made.whole:
        # A whole number is a multiple of a/b, in lowest terms, if it is one of a.
        made.multiple = math.lcm(1, *(factor.numerator for factor in factors))
        _round(made)
    elif factors:
        raise Inexact(made.path, "is enforced only of integers")
    if made.low is not None and made.high is not None:
        if made.low > made.high or (made.low == made.high and (made.open_low or made.open_high)):
            return None
    return made


def _round(made: Number) -> None:
    """Make the bounds of whole numbers whole and inclusive."""
    if made.low is not None:
        made.low = Fraction(math.floor(made.low) + 1 if made.open_low else math.ceil(made.low))
    if made.high is not None:
        made.high = Fraction(math.ceil(made.high) - 1 if made.open_high else math.floor(made.high))
    made.open_low = made.open_high = False


def string(parts: list[Part]) -> String:
    made = String()
    for schema, path in parts:
        assert isinstance(schema, dict)
        made.least = max(made.least, int(schema.get("minLength", 0)))
        if "maxLength" in schema:
            made.most = int(schema["maxLength"]) if made.most is None else min(made.most, int(schema["maxLength"]))
            made.path = (*path, "maxLength")
        elif "minLength" in schema:
            made.path = made.path or (*path, "minLength")
        for key in ("pattern", "format"):
            if key not in schema:
                continue
            pattern = schema[key]
            if key == "format":
                if pattern in UNSERVED:
                    raise Inexact((*path, key), f"{pattern} cannot be enforced")
                if pattern in ENFORCED:
                    if made.format not in ("", pattern):
                        raise Inexact((*path, key), f"{pattern} cannot be enforced beside {made.format}")
                    made.format = pattern
                if (pattern := PATTERNS.get(pattern)) is None:
                    continue
            node = pattern_of(pattern, (*path, key))
            if all(node != other for other, _ in made.patterns):
                made.patterns.append((node, Part(pattern, (*path, key))))
    return made


def pattern_of(pattern: str, path: tuple[str | int, ...]) -> Node:
    try:
        return parsed(pattern)
    except Unsupported as problem:
        raise Inexact(path, f"{pattern!r} cannot be enforced: {problem}") from None


# ---------------------------------------------------------------- arrays and objects


def array(parts: list[Part]) -> Array:
    made = Array([], ())
    for schema, path in parts:
        assert isinstance(schema, dict)
        made.least = max(made.least, int(schema.get("minItems", 0)))
        if "maxItems" in schema:
            made.most = int(schema["maxItems"]) if made.most is None else min(made.most, int(schema["maxItems"]))
        if schema.get("uniqueItems") is True:
            made.unique = (*path, "uniqueItems")
    each = [_items(part) for part in parts]
    longest = max((len(prefix) for prefix, _ in each), default=0)
    for i in range(longest):
        made.prefix.append(tuple(x for prefix, rest in each for x in (prefix[i : i + 1] or rest)))
    made.rest = tuple(x for _, rest in each for x in rest)
    for part in parts:
        _contain(made, part)
    return made


def _items(part: Part) -> tuple[list[Part], list[Part]]:
    """(the schemas of the first items, those of the others)."""
    schema, path = part
    assert isinstance(schema, dict)
    first, rest = "prefixItems", "items"
    if isinstance(schema.get("items"), list):  # before draft 2020-12
        first, rest = "items", "additionalItems"
    if rest not in schema and "unevaluatedItems" in schema:
        rest = "unevaluatedItems"
    prefix = [Part(one, (*path, first, i)) for i, one in enumerate(schema.get(first, []))]
    return prefix, [Part(schema[rest], (*path, rest))] if rest in schema else []


def _contain(made: Array, part: Part) -> None:
    schema, path = part
    assert isinstance(schema, dict)
    least = schema.get("minContains", 1)
    if "contains" not in schema or (least == 0 and "maxContains" not in schema):
        return
    wanted = Part(schema["contains"], (*path, "contains"))
    if "maxContains" not in schema and wanted.schema in (True, {}):
        made.least = max(made.least, int(least))
    elif "maxContains" not in schema and made.most == 1 and least == 1:
        made.least = max(made.least, 1)
        made.prefix[:1] = [(*(made.prefix[0] if made.prefix else made.rest), wanted)]
    else:
        raise Inexact(wanted.path, "is enforced only with maxItems 1")


def object_(parts: list[Part]) -> Object:
    made = Object({}, {}, None, [])
    names: dict[str, None] = {}
    explicit = False
    for schema, path in parts:
        assert isinstance(schema, dict)
        names |= dict.fromkeys(schema.get("properties", {}))
        made.required |= dict.fromkeys(schema.get("required", []))
        if "propertyNames" in schema:
            made.names += (Part(schema["propertyNames"], (*path, "propertyNames")),)
        made.least = max(made.least, int(schema.get("minProperties", 0)))
        if "minProperties" in schema:
            made.path = (*path, "minProperties")
        if "maxProperties" in schema:
            most = int(schema["maxProperties"])
            made.most = most if made.most is None else min(made.most, most)
        explicit = explicit or _others(Part(schema, path)) is not None
    names |= made.required
    for name in names:
        made.properties[name] = tuple(x for part in parts for x in _property(part, name))
    with_patterns = [part for part in parts if part.schema.get("patternProperties")]  # type: ignore[attr-defined]
    listed = any("properties" in part.schema for part in parts)  # type: ignore[operator]
    if explicit or not (listed or with_patterns) or (not with_patterns and made.least > len(names)):
        made.others = tuple(x for part in parts if (x := _others(part)) is not None)
    for part in with_patterns:
        elsewhere = tuple(x for other in parts if other is not part and (x := _others(other)) is not None)
        for pattern, inner in part.schema["patternProperties"].items():  # type: ignore[index]
            path = (*part.path, "patternProperties", pattern)
            made.patterns.append((pattern_of(pattern, path), (Part(inner, path), *elsewhere)))
    if len(with_patterns) > 1 or (len(made.patterns) > 1 and not _apart([node for node, _ in made.patterns])):
        path = (*with_patterns[-1].path, "patternProperties")
        raise Inexact(path, "is enforced only if no name can match two of its patterns")
    return made


def _others(part: Part) -> Part | None:
    """What a schema asks of properties that it does not name, if it says so."""
    schema, path = part
    assert isinstance(schema, dict)
    for key in ("additionalProperties", "unevaluatedProperties"):
        if key in schema:
            return Part(schema[key], (*path, key))
    return None


def _property(part: Part, name: str) -> list[Part]:
    """What a schema asks of a property."""
    schema, path = part
    assert isinstance(schema, dict)
    found = []
    if name in schema.get("properties", {}):
        found.append(Part(schema["properties"][name], (*path, "properties", name)))
    for pattern, inner in schema.get("patternProperties", {}).items():
        if matches(pattern_of(pattern, (*path, "patternProperties", pattern)), name):
            found.append(Part(inner, (*path, "patternProperties", pattern)))
    if not found and (others := _others(part)) is not None:
        found.append(others)
    return found


def _apart(nodes: list[Node]) -> bool:
    """Whether texts of these differ by their first characters, as far as that is plain to see."""
    begins = [first_text(node) for node in nodes]
    return not any(
        one.startswith(other) or other.startswith(one) for i, one in enumerate(begins) for other in begins[:i]
    )
