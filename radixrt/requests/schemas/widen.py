"""The nearest wider schema that can be enforced, for tools that need not follow theirs exactly."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from radixrt.requests.schemas.inexact import Inexact, place
from radixrt.requests.schemas.patterns import in_json
from radixrt.requests.schemas.rewrite import rewrite
from radixrt.requests.schemas.shape import well_formed

MAX_DROPPED = 64
"""The most keywords that are dropped; with more, the schema is."""
SHORT = 16 << 10
"""The longest schema, in characters, whose result is cached."""


def widened(schema: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(a schema that can be enforced and takes all that `schema` takes; JSON pointers to the keywords that it leaves
    out, where `oneOf` became `anyOf` if it could)."""
    text = json.dumps(schema)
    found, dropped = (_known if len(text) <= SHORT else _widened)(text)
    return (json.loads(found) if dropped else schema), dropped


def _widened(text: str) -> tuple[str, tuple[str, ...]]:
    try:
        schema, malformed = well_formed(json.loads(text))
    except Inexact:
        return json.dumps({"type": "object"}), ("#",)
    dropped = [one.place for one in malformed]
    while len(dropped) <= MAX_DROPPED:
        try:
            rewrite(schema, in_json)
            return json.dumps(schema), tuple(dropped)
        except Inexact as problem:
            dropped.append(place(problem.path))
            if not _drop(schema, problem.path):
                break
    return json.dumps({"type": "object"}), ("#",)


_known = lru_cache(256)(_widened)


def _drop(schema: Any, path: tuple[str | int, ...]) -> bool:
    """Drop the last keyword of `path`, or what holds it in a list or by name; False if that is all of the schema."""
    while path:
        around = schema
        for key in path[:-1]:
            around = around[key]
        key = path[-1]
        if isinstance(around, dict) and key in around:
            inner = around.pop(key)
            if key == "oneOf" and "anyOf" not in around:
                around["anyOf"] = inner
            return True
        path = path[:-1]
    return False
