"""The nearest wider schema that can be enforced, for tools that need not follow theirs exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from radixrt.requests.schema_keywords import NAMED
from radixrt.requests.schemas.inexact import Inexact, place
from radixrt.requests.schemas.patterns import in_json
from radixrt.requests.schemas.rewrite import rewrite
from radixrt.requests.schemas.shape import well_formed

MAX_DROPPED = 64
"""The most keywords that are dropped; with more, the schema is."""
SHORT = 16 << 10
"""The longest schema, in characters, whose result is cached."""


def widened(
    schema: dict[str, Any], write: Callable[[dict[str, Any]], Any] | None = None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(a schema that can be enforced and takes all that `schema` takes; JSON pointers to the keywords that it leaves
    out, where `oneOf` became `anyOf` if it could). `write` raises Inexact for what cannot be enforced; by default that
    is what `rewrite` cannot."""
    text = json.dumps(schema)
    found, dropped = (_known if len(text) <= SHORT else _widened)(text, write or _rewritten)
    return (json.loads(found) if dropped else schema), dropped


def _rewritten(schema: dict[str, Any]) -> None:
    rewrite(schema, in_json)


def _widened(text: str, write: Callable[[dict[str, Any]], Any]) -> tuple[str, tuple[str, ...]]:
    try:
        schema, malformed = well_formed(json.loads(text))
    except Inexact:
        return json.dumps({"type": "object"}), ("#",)
    dropped = [one.place for one in malformed]
    while len(dropped) <= MAX_DROPPED:
        try:
            write(schema)
            return json.dumps(schema), tuple(dropped)
        except Inexact as problem:
            path = _drop(schema, problem.path)
            if not path:
                break
            dropped.append(place(path))
    return json.dumps({"type": "object"}), ("#",)


_known = lru_cache(256)(_widened)


def _drop(schema: Any, path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Drop the last keyword of `path` that there is, or what holds it in a list; a schema with a name comes to take any
    value. Returns the path of what was dropped, () if that is all of the schema."""
    while path:
        around: Any = schema
        for key in path[:-1]:
            around = _inner(around, key)
        key = path[-1]
        if isinstance(around, dict) and key in around and not (named := _is_named(path)):
            inner = around.pop(key)
            if key == "oneOf" and "anyOf" not in around:
                around["anyOf"] = inner
            if key == "patternProperties":  # what they allow is to stay allowed
                around.pop("additionalProperties", None)
            return path
        if isinstance(around, dict) and key in around and named and around[key] not in ({}, True):
            around[key] = {}
            return path
        path = path[:-1]
    return ()


def _is_named(path: tuple[str | int, ...]) -> bool:
    """Whether the last key is the name of a schema, not a keyword."""
    return len(path) > 1 and path[-2] in NAMED and not _is_named(path[:-1])


def _inner(value: Any, key: str | int) -> Any:
    if isinstance(value, dict):
        return value.get(key)
    return value[key] if isinstance(value, list) and isinstance(key, int) and key < len(value) else None
