"""Grammars of arguments that are not written as one JSON object: exactly the schema's, or Inexact.

schema --rewrite--> few keywords --Writer--> a structural tag's format: members by name, in an order

How a member and its value are written is the format's: a=1 (Python), <parameter=a>1</parameter> (tagged), a:1 (Gemma).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from radixrt.formats.parsing.formats import Schema, constant, either, json_schema, sequence
from radixrt.requests.schemas.inexact import Inexact
from radixrt.requests.schemas.patterns import ALL, Chars, Node, Ranges, Repeat, in_text, other_than, without
from radixrt.requests.schemas.rewrite import DEFINED, rewrite

Form = dict[str, Any]
"""A structural tag's format."""
Path = tuple[str | int, ...]
MAX_ORDERED_ARGUMENTS = 16
"""The most optional arguments for which a grammar fixes the order, where a separator stands between them: its size is
quadratic in them."""
MAX_FORMS = 1000
"""The most references, counted for each place where they are."""
MAX_SHARED_CHARS = 1 << 20
"""The most characters of definitions, counted for each value that may refer to them."""
MAX_LEAST = 128
"""The largest `minLength` that is enforced of a text without quotes."""
FIRST: Ranges = ((65, 90), (95, 95), (97, 122))
MORE: Ranges = ((45, 46), (48, 57), *FIRST)
"""The characters of names that the schema does not define: the first, and further ones."""
ANY_TEXT: Form = {"type": "any_text"}
CANNOT = "cannot be enforced in calls of this model"
AMBIGUOUS = "cannot be told apart in calls of this model"


class Json:
    """How formats write arguments that are a JSON object."""

    @staticmethod
    def arguments(schema: Schema) -> Form:
        """See `formats.ToolFormat`."""
        rewrite(schema, in_text)
        return json_schema(schema)


class Writer(ABC):
    """Writes one schema. What is nested in members is up to `member`."""

    separator = ""
    """Between members."""
    name: re.Pattern[str]
    """The characters of a member's name."""

    def __init__(self, schema: Schema) -> None:
        self._nodes: dict[str, Node] = {}
        self.given = schema
        root = rewrite(schema, self._keep)
        self.shared: dict[str, Any] = root.get("$defs", {})
        self._root = {key: value for key, value in root.items() if key != "$defs"}
        self._within: list[str] = []
        self._left, self._chars_left = MAX_FORMS, MAX_SHARED_CHARS

    def _keep(self, node: Node) -> str:
        text = in_text(node)
        self._nodes[text] = node
        return text

    def written(self) -> Form:
        """The arguments. Raises Inexact."""
        return self.members(self._root, ())

    @abstractmethod
    def member(self, name: str | None, more: Form, value: Any, path: Path) -> Form:
        """A member with this name, or if it is None with one of the format `more`. `value` is a schema as `rewrite`
        makes it, at `path`."""

    # ------------------------------------------------------------ objects

    def members(self, schema: Any, path: Path) -> Form:
        """The members of an object."""
        return one_of([self._members({} if one is True else one, path) for one in self.branches(schema, path)])

    def _members(self, schema: dict[str, Any], path: Path) -> Form:
        if schema.get("patternProperties"):
            raise Inexact((*path, "patternProperties"), CANNOT)
        properties = schema.get("properties", {})
        values = {name: self._named(name, part, path) for name, part in self.ordered(properties)}
        least, most = schema.get("minProperties", 0), schema.get("maxProperties")
        other = None
        if (rest := schema.get("additionalProperties", True)) is not False:
            names = in_text(other_than(properties, FIRST, MORE, empty=False))
            other = self.member(None, {"type": "regex", "pattern": names[1:-1]}, rest, (*path, "additionalProperties"))
        if not values:
            return constant("") if other is None else counted(other, self.separator, least, most)
        if most is not None or least > 1:
            raise Inexact((*path, "minProperties" if most is None else "maxProperties"), CANNOT)
        return in_order(values, schema.get("required", ()), self.separator, other, bool(least))

    def ordered(self, properties: dict[str, Any]) -> list[tuple[str, Any]]:
        return [*properties.items()]

    def _named(self, name: str, part: Any, path: Path) -> Form:
        path = (*path, "properties", name)
        if not all(map(self.name.fullmatch, name)) or name != name.strip() or not name:
            raise Inexact(path, "has a name that cannot be written in calls of this model")
        return self.member(name, constant(name), part, path)

    # ------------------------------------------------------------ values

    def branches(self, schema: Any, path: Path) -> Iterator[Any]:
        """The alternatives of a schema, none of them a reference or a choice."""
        if isinstance(schema, dict) and "$ref" in schema:
            with self.inside(schema, path) as inner:
                yield from self.branches(inner, path)
        elif isinstance(schema, dict) and "anyOf" in schema:
            for one in schema["anyOf"]:
                yield from self.branches(one, path)
        else:
            yield schema

    @contextmanager
    def inside(self, schema: dict[str, Any], path: Path) -> Iterator[Any]:
        """What a schema refers to, while that is written."""
        name = schema["$ref"].removeprefix(DEFINED)
        self._left -= 1
        if name in self._within or self._left < 0:
            raise Inexact(path, f"refers to itself, or to too much, which {CANNOT}")
        self._within.append(name)
        yield self.shared[name]
        self._within.pop()

    def json(self, schema: Any) -> Form:
        """A value as JSON."""
        if not self.shared or not isinstance(schema, dict):
            return json_schema(schema)
        self._chars_left -= len(str(self.shared))
        if self._chars_left < 0:
            raise Inexact((), "leads to too many definitions for calls of this model")
        return json_schema(schema | {"$defs": self.shared})

    def text(self, schema: dict[str, Any], path: Path) -> Form:
        """A string as it is, up to a mark that begins with `<`."""
        if "format" in schema:
            return {"type": "json_schema", "json_schema": schema, "style": "raw"}
        if "pattern" not in schema:
            return ANY_TEXT
        node = self._nodes[schema["pattern"]]
        if isinstance(node, Repeat) and node.inner == Chars(ALL):
            return _of_length(node.least, node.most, path)
        if (kept := without(node, "<")) is None:
            raise Inexact((*path, "pattern"), CANNOT)
        return {"type": "regex", "pattern": in_text(kept)[1:-1]}


def _of_length(least: int, most: int | None, path: Path) -> Form:
    """A text of a length; its first `least` characters do not begin or end a mark."""
    if least > MAX_LEAST:
        raise Inexact((*path, "minLength"), f"above {MAX_LEAST} {CANNOT}")
    rest = ANY_TEXT if most is None else ANY_TEXT | {"max_chars": most - least}
    if not least:
        return rest
    one = "([^<]|<[^/|<])" if most is None else "[^<]"
    first = {"type": "regex", "pattern": f"{one}{{{least}}}"}
    return sequence(first, rest) if most != least else first


# ---------------------------------------------------------------- one after another


def joined(separator: str, form: Form) -> Form:
    return sequence(constant(separator), form) if separator else form


def optional(form: Form) -> Form:
    return {"type": "optional", "content": form}


def repeated(form: Form, least: int, most: int | None) -> Form:
    if (least, most) == (0, None):
        return {"type": "star", "content": form}
    return {"type": "repeat", "min": least, "max": -1 if most is None else most, "content": form}


def counted(one: Form, separator: str, least: int = 0, most: int | None = None) -> Form:
    """From `least` to `most` of `one`."""
    if most == 0:
        return constant("")
    more = (
        [] if most == 1 else [repeated(joined(separator, one), max(least - 1, 0), None if most is None else most - 1)]
    )
    found = sequence(one, *more) if more else one
    return found if least else optional(found)


def in_order(
    values: dict[str, Form], names: Any, separator: str, other: Form | None = None, some: bool = False
) -> Form:  # fmt: skip
    """Members, given those of each name: the required ones, `names`, come first where there is a separator. `other`
    ones may follow. With `some` there is one at least."""
    more = [repeated(joined(separator, other), 0, None)] if other else []
    if any(name in names for name in values):
        if not separator:
            return sequence(*(one if name in names else optional(one) for name, one in values.items()), *more)
        required = [name for name in values if name in names]
        first = [part for name in required for part in (constant(separator), values[name])][1:]
        rest = [optional(joined(separator, one)) for name, one in values.items() if name not in names]
        return sequence(*first, *rest, *more)
    if len(values) > MAX_ORDERED_ARGUMENTS and separator:
        return counted(one_of([*values.values(), *([other] if other else [])]), separator, int(some))
    if not separator and not some:
        return sequence(*map(optional, values.values()), *more)
    # Any of the optional ones may be the first.
    rest = [optional(joined(separator, one)) for one in values.values()]
    begins = [_sequence(one, *rest[n + 1 :], *more) for n, one in enumerate(values.values())]
    begins += [sequence(other, *more)] if other else []
    return one_of(begins) if some else optional(one_of(begins))


def one_of(forms: list[Form]) -> Form:
    return forms[0] if len(forms) == 1 else either(*forms)


def _sequence(*forms: Form) -> Form:
    return forms[0] if len(forms) == 1 else sequence(*forms)
