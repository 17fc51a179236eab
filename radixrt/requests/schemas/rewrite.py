"""Rewrites a JSON schema into one that xgrammar enforces exactly: it admits no invalid document, and each valid one but
for these:

- Properties are written in the schema's order. Those that are neither named nor asked for by `additionalProperties`
  or `patternProperties` are not written where others are named.
- Numbers with bounds have at most six decimals and no exponent, integers no decimals.
- A value without a `type` has that which all its keywords are for.
- A property that tells the branches of `oneOf` apart is always written.

xgrammar looks at one keyword of `$ref`, `const`, `enum`, `anyOf`, `oneOf`, `allOf` and `type`, in this order, and not
at those beside it; what it writes for `allOf` is any value. So conjunctions are resolved first, by type (`rules`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from fractions import Fraction
from itertools import permutations
from typing import Any
from urllib.parse import unquote

from radixrt.requests.schemas import shape
from radixrt.requests.schemas.formats import ENFORCED
from radixrt.requests.schemas.inexact import Inexact, Part
from radixrt.requests.schemas.patterns import (
    ANYTHING,
    NEVER,
    Node,
    characters,
    matches,
    other_than,
    within,
)
from radixrt.requests.schemas.rules import (
    LARGEST,
    Array,
    Number,
    Object,
    Parts,
    Rule,
    String,
    Values,
    array,
    number,
    object_,
    string,
    type_of,
    types_of,
    whole,
)

MAX_PARTS = 20_000
"""The most schemas that are visited."""
MAX_RULES = 256
"""The most alternatives of one value."""
MAX_WIDTH = 10_000
"""The widest range in which xgrammar looks for multiples of a number."""
MAX_MULTIPLE = 1024
MAX_REPEAT = (1 << 31) - 1
MAX_UNIQUE = 4
"""The most values of the items of an array with `uniqueItems` whose permutations are written out."""
DEFINED = "#/$defs/"
COMBINATORS = ("$ref", "allOf", "anyOf", "oneOf")
NONE = None
"""In place of a schema: no value satisfies it."""


def rewrite(root: Any, pattern: Callable[[Node], str]) -> Any:
    """Rewrite a schema; its patterns are written by `pattern`. Raises Inexact."""
    made = _Rewriter(root, pattern)
    try:
        found = made.schema((Part(root, ()),))
        made.define()
    except RecursionError:
        raise Inexact((), "is nested too deeply") from None
    if found is NONE:
        raise Inexact((), "is satisfied by no value")
    while "$ref" in found and f'"{found["$ref"]}"' not in json.dumps(made.defined):
        found = made.defined.pop(found["$ref"].removeprefix(DEFINED))
    return found | {"$defs": made.defined} if made.defined else found


class _Rewriter:
    """`schema` is the recursion; everything else serves one of its steps."""

    def __init__(self, root: Any, pattern: Callable[[Node], str]) -> None:
        self._root = root
        self._pattern = pattern
        self._anchors: dict[str, Part] | None = None
        self._names: dict[tuple[str, ...], str] = {}
        self._undefined: list[tuple[str, Parts]] = []
        self.defined: dict[str, Any] = {}
        self._left = MAX_PARTS

    def schema(self, parts: Parts) -> Any:
        """A schema of the values that satisfy all `parts`; NONE if there are none. For what is referred to it is a
        reference, and `define` says to what: so it is there once, and may hold itself."""
        if not any(_refers(part.schema) for part in parts):
            return self._either(parts)
        key = tuple(sorted({json.dumps(part.schema) for part in parts}))
        if key not in self._names:
            self._names[key] = f"v{len(self._names)}"
            self._undefined.append((self._names[key], parts))
        return {"$ref": DEFINED + self._names[key]}

    def define(self) -> None:
        """Define all that is referred to."""
        while self._undefined:
            name, parts = self._undefined.pop()
            if (found := self._either(parts)) is NONE:
                raise Inexact(parts[0].path, "is satisfied by no value")
            self.defined[name] = found

    def _either(self, parts: Parts) -> Any:
        plain, choices = self._split(parts)
        if choices is None:
            return NONE
        if plain or len(choices) != 1:
            if not plain and not choices:
                return {}
            found = [self._written(rule) for rule in self._rules(plain, choices, guess=True)]
        elif choices[0][0]:
            found = [self._written(rule) for rule in self._rules(plain, choices, guess=True)]
        else:
            found = [self.schema((branch,)) for branch in choices[0][1]]
        return _one_of([one for one in found if one is not NONE])

    # ------------------------------------------------------------ combinators

    def _split(self, parts: Parts) -> tuple[list[Part], list[tuple[bool, list[Part]]] | None]:
        """(schemas without combinators that ask for something, (whether exactly one, branches) of each choice); in
        place of the choices None if there is no value."""
        plain: list[Part] = []
        choices: list[tuple[bool, list[Part]]] = []
        left, seen = list(parts), set()
        while left:
            part = left.pop(0)
            self._count(part.path)
            schema, path = part
            if schema is False:
                return plain, None
            if schema is True:
                continue
            if not isinstance(schema, dict):
                raise Inexact(path, "must be a schema")
            shape.check(part)
            if "not" in schema and schema["not"] is not False:
                return plain, None
            more = []
            if "$ref" in schema and schema["$ref"] not in seen:
                seen.add(schema["$ref"])
                more.append(self._referred(schema["$ref"], (*path, "$ref")))
            more += _branches(part, "allOf")
            left = more + left
            for key in ("anyOf", "oneOf"):
                if key in schema:
                    choices.append((key == "oneOf" and len(schema[key]) > 1, _branches(part, key)))
            own = {key: inner for key, inner in schema.items() if key in _ASKING}
            if own:
                plain.append(Part(own, path))
        return plain, choices

    def _rules(self, plain: list[Part], choices: list[tuple[bool, list[Part]]], guess: bool) -> list[Rule]:
        """The rules of the values that satisfy `plain` and each of the choices."""
        if not choices:
            return list(self._plain_rules(plain, guess))
        (exclusive, branches), others = choices[0], choices[1:]
        context = [*plain]
        each = []
        for branch in branches:
            found, more = self._split((branch,))
            each.append(None if more is None else (context + found, [*others, *more]))
        rules = [[] if one is None else self._rules(*one, guess=guess) for one in each]
        if exclusive:
            loose = [[] if one is None else self._rules(*one, guess=False) for one in each]
            rules = [self._only(i, rules[i], loose, branches) for i in range(len(branches))]
        flat = [rule for some in rules for rule in some]
        if len(flat) > MAX_RULES:
            raise Inexact(branches[0].path[:-1], f"is of more than {MAX_RULES} alternatives")
        return flat

    def _only(self, i: int, rules: list[Rule], loose: list[list[Rule]], branches: list[Part]) -> list[Rule]:
        """Those of the rules of a branch of `oneOf` that satisfy no other branch."""
        for j, others in enumerate(loose):
            if j == i:
                continue
            for other in others:
                kept = []
                for rule in rules:
                    if (parted := self._without(rule, other)) is None:
                        first, second = sorted((i, j))
                        raise Inexact(
                            branches[0].path[:-1], f"cannot be enforced: a value may satisfy both {first} and {second}"
                        )
                    kept += parted
                rules = kept
        return rules

    def _without(self, rule: Rule, other: Rule) -> list[Rule] | None:
        """Rules of the values that satisfy `rule`, and do not satisfy `other`; None if there is no way to say so."""
        if isinstance(rule, Values):
            kept = [value for value in rule.values if not self._holds(value, other)]
            return [Values(kept)] if kept else []
        if self._apart(rule, other):
            return [rule]
        if not isinstance(rule, Object) or not isinstance(other, Object):
            return None
        if rule.others is None and not rule.patterns:  # nothing but its properties is written
            if any(name not in rule.properties for name in other.required):
                return [rule]
            missing = [name for name in other.required if name not in rule.required]
            if missing:
                return [self._dropped(rule, name) for name in missing]
        # A property that tells them apart is written.
        for name, parts in rule.properties.items():
            if name in other.properties and name not in rule.required:
                if self._parts_apart(parts, other.properties[name]):
                    return [_changed(rule, required={**rule.required, name: None})]
        return None

    def _dropped(self, rule: Object, name: str) -> Object:
        return _changed(rule, properties={key: x for key, x in rule.properties.items() if key != name})

    def _apart(self, rule: Rule, other: Rule) -> bool:
        """Whether no value satisfies both, as far as that is plain to see."""
        if isinstance(rule, Values) or isinstance(other, Values):
            one, two = (rule, other) if isinstance(rule, Values) else (other, rule)
            assert isinstance(one, Values)
            return not any(self._holds(value, two) for value in one.values)
        if type(rule) is not type(other):
            return True
        if isinstance(rule, Number) and isinstance(other, Number):
            return _below(rule, other) or _below(other, rule)
        if isinstance(rule, Object) and isinstance(other, Object):
            both = rule.required.keys() & other.required.keys()
            if any(self._parts_apart(rule.properties[name], other.properties[name]) for name in both):
                return True
            return self._lacks(rule, other) or self._lacks(other, rule)
        if isinstance(rule, String) and isinstance(other, String):
            return _length_below(rule, other) or _length_below(other, rule)
        return False

    def _lacks(self, rule: Object, other: Object) -> bool:
        """Whether `rule` forbids a property that `other` requires."""
        for name in other.required:
            parts = rule.properties.get(name, rule.others or ())
            if any(part.schema is False for part in parts) and not rule.patterns:
                return True
        return False

    def _parts_apart(self, one: Parts, other: Parts) -> bool:
        self._count(one[0].path if one else ())
        rules, others = self._all_rules(one), self._all_rules(other)
        if not rules or not others:
            return False  # it is in no value, and tells nothing
        return all(self._apart(rule, two) for rule in rules for two in others)

    def _all_rules(self, parts: Parts) -> list[Rule]:
        plain, choices = self._split(parts)
        if choices is None:
            return []
        # A value of `oneOf` is one of `anyOf`.
        return self._rules(plain, [(False, branches) for _, branches in choices], guess=False)

    # ------------------------------------------------------------ references

    def _referred(self, ref: str, path: tuple[str | int, ...]) -> Part:
        """The schema that a reference names."""
        own = self._root.get("$id") if isinstance(self._root, dict) else None
        if isinstance(own, str) and own.rstrip("#") and ref.startswith(own.rstrip("#")):
            ref = ref[len(own.rstrip("#")) :] or "#"
        if not ref.startswith("#"):
            raise Inexact(path, f"{ref!r} is not within the schema")
        if ref not in ("#", "") and not ref.startswith("#/"):
            return self._anchored(ref[1:], path)
        found, keys = self._root, []
        for word in unquote(ref[1:]).split("/")[1:]:
            key: str | int = word.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and str(key).isdecimal() and int(key) < len(found):
                key = int(key)
            elif not isinstance(found, dict) or key not in found:
                raise Inexact(path, f"{ref!r} is nowhere in the schema")
            found = found[key]
            keys.append(key)
        return Part(found, tuple(keys))

    def _anchored(self, name: str, path: tuple[str | int, ...]) -> Part:
        if self._anchors is None:
            self._anchors = {}
            left = [Part(self._root, ())]
            while left:
                value, at = left.pop()
                if isinstance(value, dict):
                    for key in ("$anchor", "$dynamicAnchor"):
                        if isinstance(value.get(key), str):
                            self._anchors[value[key]] = Part(value, at)
                    left += [Part(inner, (*at, key)) for key, inner in value.items() if key not in ("const", "enum")]
                elif isinstance(value, list):
                    left += [Part(inner, (*at, i)) for i, inner in enumerate(value)]
        if name not in self._anchors:
            raise Inexact(path, f"{'#' + name!r} is nowhere in the schema")
        return self._anchors[name]

    # ------------------------------------------------------------ rules

    def _plain_rules(self, parts: list[Part], guess: bool) -> Iterator[Rule]:
        lists = [
            values
            for part in parts
            for key in ("const", "enum")
            if key in part.schema  # type: ignore[operator]
            for values in [part.schema[key] if key == "enum" else [part.schema[key]]]  # type: ignore[index]
        ]
        if lists:
            others = [Part({k: v for k, v in p.schema.items() if k not in ("const", "enum")}, p.path) for p in parts]  # type: ignore[attr-defined]
            rules = list(self._plain_rules(others, guess=False))
            values = [
                value
                for value in lists[0]
                if all(any(_equal(value, one) for one in more) for more in lists[1:])
                and any(self._holds(value, rule) for rule in rules)
            ]
            if values:
                yield Values(values)
            return
        for kind in types_of(parts, guess):
            if kind in ("boolean", "null"):
                yield Values([False, True] if kind == "boolean" else [None])
            elif kind in ("integer", "number"):
                if (found := number(parts, kind == "integer")) is not None:
                    yield found
            elif kind == "string":
                yield string(parts)
            else:
                yield array(parts) if kind == "array" else object_(parts)

    def _holds(self, value: Any, rule: Rule) -> bool:
        """Whether a value satisfies a rule."""
        match rule:
            case Values(values):
                return any(_equal(value, one) for one in values)
            case Number():
                return type_of(value) in ("integer", "number") and _in_range(value, rule)
            case String():
                return isinstance(value, str) and self._string_holds(value, rule)
            case Array():
                return isinstance(value, list) and self._array_holds(value, rule)
            case Object():
                return isinstance(value, dict) and self._object_holds(value, rule)

    def _satisfies(self, value: Any, parts: Parts) -> bool:
        plain, choices = self._split(parts)
        if choices is None:
            return False
        return any(self._holds(value, rule) for rule in self._rules(plain, choices, guess=False))

    def _string_holds(self, value: str, rule: String) -> bool:
        if rule.format:
            raise Inexact(rule.path, f"a value beside {rule.format} cannot be checked")
        fits = rule.least <= len(value) and (rule.most is None or len(value) <= rule.most)
        return fits and all(matches(node, value) for node, _ in rule.patterns)

    def _array_holds(self, value: list[Any], rule: Array) -> bool:
        if not (rule.least <= len(value) and (rule.most is None or len(value) <= rule.most)):
            return False
        if rule.unique and any(_equal(x, y) for i, x in enumerate(value) for y in value[:i]):
            return False
        each = [*rule.prefix, *[rule.rest] * len(value)]
        return all(self._satisfies(one, parts) for one, parts in zip(value, each, strict=False))

    def _object_holds(self, value: dict[str, Any], rule: Object) -> bool:
        if not (rule.least <= len(value) and (rule.most is None or len(value) <= rule.most)):
            return False
        if any(name not in value for name in rule.required):
            return False
        for name, inner in value.items():
            if not self._satisfies(name, rule.names):
                return False
            parts = rule.properties.get(name)
            if parts is None:
                found = [parts for node, parts in rule.patterns if matches(node, name)]
                parts = tuple(x for some in found for x in some) if found else rule.others or ()
            if not self._satisfies(inner, parts):
                return False
        return True

    def _count(self, path: tuple[str | int, ...]) -> None:
        self._left -= 1
        if self._left < 0:
            raise Inexact(path, f"leads to more than {MAX_PARTS} schemas")

    # ------------------------------------------------------------ writing

    def _written(self, rule: Rule) -> Any:
        match rule:
            case Values(values):
                return _one_of([_constant(value) for value in values]) if values else NONE
            case Number():
                return _number(rule)
            case String():
                return self._string(rule)
            case Array():
                return self._array(rule)
            case Object():
                return self._object(rule)

    def _string(self, rule: String) -> Any:
        patterns, bounds = rule.patterns, (rule.least, rule.most)
        if rule.most is not None and rule.most < rule.least:
            return NONE
        if len(patterns) + bool(rule.format) > 1:
            raise Inexact(patterns[-1][1].path, "cannot be enforced beside another pattern or format")
        if rule.format:
            if rule.least > ENFORCED[rule.format] or rule.most is not None:
                raise Inexact(rule.path, f"cannot be enforced beside the format {rule.format}")
            return {"type": "string", "format": rule.format}
        if not patterns:
            return {"type": "string"} | ({} if bounds == (0, None) else {"pattern": self._pattern(characters(*bounds))})
        node = within(patterns[0][0], *bounds)
        if node is None:
            raise Inexact(rule.path, f"cannot be enforced beside the pattern {patterns[0][1].schema!r}")
        return NONE if node == NEVER else {"type": "string", "pattern": self._pattern(node)}

    def _array(self, rule: Array) -> Any:
        most, prefix = rule.most, []
        if rule.unique and (most is None or most > 1):
            return self._unique(rule)
        for i, parts in enumerate(rule.prefix[:most]):
            found = self.schema(parts)
            if found is NONE:
                most = i
                break
            prefix.append(found)
        rest = NONE if most is not None and most <= len(prefix) else self.schema(rule.rest)
        if rest is NONE:
            most = len(prefix)
        if most is not None and most < rule.least:
            return NONE
        made: dict[str, Any] = {"type": "array", "items": False if rest is NONE else rest}
        if prefix:
            made["prefixItems"] = prefix
        if rule.least:
            made["minItems"] = min(rule.least, MAX_REPEAT)
        if rest is not NONE and most is not None and most < MAX_REPEAT:
            made["maxItems"] = most
        return made

    def _unique(self, rule: Array) -> Any:
        """Arrays of different items: all that there are, of few values."""
        assert rule.unique
        found = {} if rule.prefix else self._either(rule.rest)
        values = found["enum"] if found is not NONE and found.keys() == {"enum"} else None
        if values is None or len(values) > MAX_UNIQUE:
            raise Inexact(
                rule.unique, f"is enforced only with maxItems 1, or if items are of {MAX_UNIQUE} values at most"
            )
        most = len(values) if rule.most is None else min(len(values), rule.most)
        return _one_of([
            _constant([*some]) for count in range(rule.least, most + 1) for some in permutations(values, count)
        ])  # fmt: skip

    def _object(self, rule: Object) -> Any:
        properties: dict[str, Any] = {}
        for name, parts in rule.properties.items():
            if self._satisfies(name, rule.names) and (found := self.schema(parts)) is not NONE:
                properties[name] = found
            elif name in rule.required:
                return NONE
        forbidden = [name for name in rule.properties if name not in properties]
        others = NONE if rule.others is None else self.schema(rule.others)
        patterns = [(node, parts, self.schema(parts)) for node, parts in rule.patterns]
        if patterns and others is not NONE:
            if any(found != others for _, _, found in patterns):
                raise Inexact(next(part.path for part in rule.others or ()), "is not enforced beside patternProperties")
            patterns = []
        if rule.names and (others is not NONE or patterns):
            patterns += self._of_names(rule, properties, others, bool(patterns))
            others = NONE
        if forbidden and others is not NONE:
            patterns.append((other_than([*rule.properties]), rule.others or (), others))
            others = NONE
        for node, parts, _ in patterns:
            if any(matches(node, name) for name in forbidden):
                raise Inexact(parts[0].path, "is not enforced: it matches a property that is forbidden")
        written = {self._pattern(node): found for node, _, found in patterns if found is not NONE}
        for node, parts, found in patterns:
            for name, own in properties.items():
                if found is not NONE and matches(node, name) and own != found:
                    raise Inexact(parts[0].path, f"is not enforced: it matches {name!r}, which is a property")
        return _object_of(rule, properties, others, written)

    def _of_names(
        self, rule: Object, properties: dict[str, Any], others: Any, among: bool
    ) -> list[tuple[Node, Parts, Any]]:
        """Patterns of the names of further properties. If there are few names, they become properties."""
        names = self._all_rules((Part({"type": "string"}, rule.names[0].path), *rule.names))
        if not among and all(isinstance(one, Values) for one in names):
            for one in names:
                for name in one.values if isinstance(one, Values) else ():
                    properties.setdefault(name, others)
            return []
        one = names[0]
        if among or len(names) > 1 or not isinstance(one, String) or one.format or len(one.patterns) > 1:
            raise Inexact(rule.names[0].path, "is enforced only if it is one pattern, a length or an enum")
        node = within(one.patterns[0][0] if one.patterns else ANYTHING, one.least, one.most)
        if node is None:
            raise Inexact(rule.names[0].path, "is enforced only if it is one pattern, a length or an enum")
        return [(node, rule.names, others)]


def _object_of(rule: Object, properties: dict[str, Any], others: Any, patterns: dict[str, Any]) -> Any:
    made: dict[str, Any] = {"type": "object", "properties": properties} if properties else {"type": "object"}
    if rule.required:
        made["required"] = list(rule.required)
    if patterns:
        made["patternProperties"] = patterns
    made["additionalProperties"] = False if others is NONE else True if others == {} else others
    if others is NONE and not patterns and not properties:
        made["properties"] = {}
    open_ = others is not NONE or bool(patterns)
    least, most = max(rule.least, len(rule.required)), rule.most
    if (most is not None and most < least) or (not open_ and least > len(properties)):
        return NONE
    if least > len(rule.required):
        if open_ and least > 1:
            raise Inexact(rule.path, "above 1 is enforced only if all properties are named")
        made["minProperties"] = least
    if most is not None and (open_ or most < len(properties)):
        made["maxProperties"] = min(most, MAX_REPEAT)
    return made


_ASKING = (shape.SHAPES.keys() | {"const"}) - {*COMBINATORS, "not"}


def _refers(schema: Any) -> bool:
    """Whether values depend on a reference that is not within a property or item."""
    if not isinstance(schema, dict):
        return False
    inner = (one for key in ("allOf", "anyOf", "oneOf") if isinstance(schema.get(key), list) for one in schema[key])
    return "$ref" in schema or any(map(_refers, inner))


def _branches(part: Part, key: str) -> list[Part]:
    schema, path = part
    assert isinstance(schema, dict)
    return [Part(one, (*path, key, i)) for i, one in enumerate(schema.get(key, []))]


def _changed(rule: Object, **changes: Any) -> Object:
    return replace(rule, **changes)


def _one_of(found: list[Any]) -> Any:
    """One schema of several, of which none is NONE."""
    different: dict[str, Any] = {}
    """By their texts: 1 == True."""
    for one in found:
        for inner in one["anyOf"] if isinstance(one, dict) and one.keys() == {"anyOf"} else [one]:
            if inner == {}:
                return {}
            different.setdefault(repr(inner), inner)
    flat = [*different.values()]
    constants = [value for one in flat if one.keys() == {"enum"} for value in one["enum"]]
    flat = [one for one in flat if one.keys() != {"enum"}]
    if constants:
        flat.insert(0, {"enum": constants})
    return NONE if not flat else flat[0] if len(flat) == 1 else {"anyOf": flat}


def _constant(value: Any) -> Any:
    """A schema of one value; one within which there may be white space."""
    if isinstance(value, dict):
        inner = {name: _constant(one) for name, one in value.items()}
        return {"type": "object", "properties": inner, "required": [*value], "additionalProperties": False}
    if isinstance(value, list):
        if not value:
            return {"type": "array", "items": False}
        return {"type": "array", "prefixItems": [*map(_constant, value)], "items": False, "minItems": len(value)}
    if isinstance(value, float) and not value.is_integer() and f"{value:.17g}" != repr(value):
        at = Fraction(Decimal(repr(value)))
        if (at * 10**6).denominator == 1:  # the enum would be 0.10000000000000001
            return _number(Number(False, at, at))
    return {"enum": [int(value) if whole(value) and not isinstance(value, bool) else value]}


def _number(rule: Number) -> Any:
    if rule.whole:
        return _integer(rule)
    made: dict[str, Any] = {"type": "number"}
    # xgrammar knows six decimals of a bound.
    for bound, is_open, way, closed, beyond in (
        (rule.low, rule.open_low, ROUND_CEILING, "minimum", "exclusiveMinimum"),
        (rule.high, rule.open_high, ROUND_FLOOR, "maximum", "exclusiveMaximum"),
    ):
        if bound is not None:
            exact = Decimal(bound.numerator) / Decimal(bound.denominator)
            near = exact.quantize(Decimal("0.000001"), way) if abs(exact) < 10**15 else exact
            made[beyond if is_open and near == exact else closed] = _plain(near)
    return made


def _plain(value: Decimal) -> int | float:
    return int(value) if value == value.to_integral_value() and abs(value) < 1 << 53 else float(value)


def _integer(rule: Number) -> Any:
    low, high, factor = rule.low, rule.high, rule.multiple or 1
    if low is not None and high is not None:
        low, high = Fraction(-(-low // factor) * factor), Fraction(high // factor * factor)
        if low > high:
            return NONE
        count = (high - low) / factor + 1
        if factor > MAX_MULTIPLE and count <= MAX_RULES:
            return {"enum": [int(low) + factor * i for i in range(int(count))]}
    if factor > 1 and not (low is None and high is None and factor <= MAX_MULTIPLE):
        if low is None or high is None or high - low >= MAX_WIDTH or factor > MAX_MULTIPLE:
            raise Inexact(rule.path, "is enforced only without bounds, or between two that are near to each other")
    made: dict[str, Any] = {"type": "integer"}
    if low is not None:
        if low > LARGEST:
            raise Inexact(rule.path, "has more than 64 bits")
        made["minimum"] = max(int(low), -LARGEST)
    if high is not None:
        if high < -LARGEST:
            raise Inexact(rule.path, "has more than 64 bits")
        made["maximum"] = min(int(high), LARGEST)
    if factor > 1:
        made["multipleOf"] = factor
    return made


def _in_range(value: int | float, rule: Number) -> bool:
    at = Fraction(Decimal(repr(value)))
    if rule.whole and at.denominator != 1:
        return False
    if rule.low is not None and (at < rule.low or (rule.open_low and at == rule.low)):
        return False
    if rule.high is not None and (at > rule.high or (rule.open_high and at == rule.high)):
        return False
    return not rule.multiple or at % rule.multiple == 0


def _below(one: Number, other: Number) -> bool:
    if one.high is None or other.low is None:
        return False
    return one.high < other.low or (one.high == other.low and (one.open_high or other.open_low))


def _length_below(one: String, other: String) -> bool:
    return one.most is not None and one.most < other.least


def _equal(one: Any, other: Any) -> bool:
    """Whether two values are equal as JSON: true is not 1."""
    if type_of(one) != type_of(other):
        return False
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(inner, other[name]) for name, inner in one.items())
    return bool(one == other)
