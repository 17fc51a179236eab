"""Which grammars are ordinary: however a text goes on, xgrammar follows it and fills a mask within microseconds, as few
states are possible at once. Their masks are made in the step itself; those of all others are watched (`watch`).

Ordinary is JSON by a schema of common keywords that is not large, alone or in a structural tag of the server's own
forms. Patterns, formats and grammars of the user's own may be ambiguous: then time grows with the text."""

from __future__ import annotations

import json
import re
from typing import Any

from radixrt.messages import Grammar
from radixrt.requests.schema_keywords import DATA, NAMED
from radixrt.requests.schemas.patterns import MAX_COUNTED

MAX_BYTES = 32 << 10
"""The most bytes of an ordinary grammar."""
MAX_ALTERNATIVES = 64
"""The most alternatives of all anyOf and oneOf of an ordinary grammar: each may be a state that is possible at the same
time as the others."""
PLAIN_KEYWORDS = frozenset({
    "$comment", "$defs", "$id", "$ref", "$schema", "additionalProperties", "anyOf", "const", "default", "definitions",
    "deprecated", "description", "enum", "examples", "exclusiveMaximum", "exclusiveMinimum", "items", "maxItems",
    "maxLength", "maximum", "minItems", "minLength", "minimum", "nullable", "oneOf", "prefixItems", "properties",
    "readOnly", "required", "strict", "title", "type", "writeOnly",
})  # fmt: skip
"""Keywords of an ordinary schema."""
PLAIN_FORMATS = {
    "json_schema": (),
    "const_string": (),
    "any_text": (),
    "tag": ("content",),
    "triggered_tags": ("tags",),
    "tags_with_separator": ("tags",),
    "sequence": ("elements",),
    "or": ("elements",),
    "optional": ("content",),
    "star": ("content",),
    "repeat": ("content",),
    "regex": (),
}
"""Types of an ordinary structural tag's formats, with the keys that hold formats."""
MAY_REPEAT = ("optional", "star", "repeat")
"""Those that are ordinary if what they hold begins with a text: it tells whether they go on."""

_NAME = re.compile(r"(\[(\\.|[^\]\\])*\])+\*?")
"""Patterns that are ordinary: characters, of which the last may repeat."""


def is_ordinary(grammar: Grammar) -> bool:
    """Whether a grammar that was compiled is ordinary."""
    if grammar.kind == "json":
        return True
    if not grammar.holds_schemas or len(grammar.text) > MAX_BYTES:
        return False
    value = json.loads(grammar.text)
    if _alternatives(value) > MAX_ALTERNATIVES:
        return False
    if grammar.kind == "json_schema":
        return _is_plain(value)
    return isinstance(value, dict) and _is_plain_format(value.get("format"))


def _is_plain(schema: Any, named: bool = False) -> bool:
    """Whether a schema has PLAIN_KEYWORDS only; with `named`, its keys are names and its values schemas."""
    if isinstance(schema, list):
        return all(map(_is_plain, schema))
    if not isinstance(schema, dict):
        return True
    if not named and any(_is_far(schema.get(key)) for key in ("minLength", "maxLength")):
        return False
    return all(
        (named or key in PLAIN_KEYWORDS) and (key in DATA and not named or _is_plain(inner, key in NAMED and not named))
        for key, inner in schema.items()
    )


def _is_far(length: Any) -> bool:
    """Whether characters are counted in blocks: where a token may end in the next block, each is tried out."""
    return isinstance(length, int | float) and length > MAX_COUNTED


def _alternatives(value: Any) -> int:
    """How many values the lists of anyOf and oneOf have."""
    if isinstance(value, list):
        return sum(map(_alternatives, value))
    if not isinstance(value, dict):
        return 0
    own = sum(len(value[key]) for key in ("anyOf", "oneOf") if isinstance(value.get(key), list))
    return own + sum(map(_alternatives, value.values()))


def _is_plain_format(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("type") not in PLAIN_FORMATS:
        return False
    if value["type"] == "regex":
        return _NAME.fullmatch(value.get("pattern", "")) is not None
    if value["type"] == "json_schema" and not _is_plain(value.get("json_schema")):
        return False
    if value["type"] in MAY_REPEAT and not _begins(value.get("content")):
        return False
    inner = [value.get(key) for key in PLAIN_FORMATS[value["type"]]]
    return all(_is_plain_format(one) for part in inner for one in (part if isinstance(part, list) else [part]))


def _begins(value: Any) -> bool:
    """Whether all that a format matches begins with a text of its own."""
    match value:
        case {"type": "const_string", "value": str(text)} | {"type": "tag", "begin": str(text)}:
            return bool(text)
        case {"type": "sequence", "elements": [first, *_]}:
            return _begins(first)
        case {"type": "or", "elements": [*several]}:
            return bool(several) and all(map(_begins, several))
    return False
