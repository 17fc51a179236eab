"""Grammars with JSON schemas as xgrammar compiles them: the schemas rewritten, and as EBNF, in which patterns may write
what JSON escapes.

    json_schema     --compilable-->  EBNF
    structural_tag  --compilable-->  the same tag, its schemas as EBNF; where they have a style, as schemas
"""

from __future__ import annotations

import json
import re
from typing import Any

from radixrt.messages import Grammar
from radixrt.requests.schemas.patterns import in_json, in_text
from radixrt.requests.schemas.rewrite import rewrite

JSON_PATTERN = re.compile(r'(Regex\("(?:\\.|[^"\\])*", json_string=)true\)')
PLAIN_KEYS = {"type", "json_schema"}
"""Keys of a format of a structural tag whose text is JSON."""


def compilable(grammar: Grammar, any_space: bool) -> str:
    """The text of a grammar that xgrammar compiles: as EBNF if it is a JSON schema, otherwise as its own kind. JSON has
    white space between tokens, or one space after `,` and `:`. Raises Inexact if a schema cannot be enforced, and what
    xgrammar raises."""
    if grammar.kind == "json_schema":
        return _ebnf(json.loads(grammar.text), any_space)
    if grammar.kind == "structural_tag":
        return json.dumps(_tag(json.loads(grammar.text), any_space), ensure_ascii=False)
    return of_four_digits(grammar.text) if grammar.kind == "regex" else grammar.text


def _tag(value: Any, any_space: bool) -> Any:
    if isinstance(value, list):
        return [_tag(inner, any_space) for inner in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "json_schema" and "json_schema" in value:
        if value.keys() == PLAIN_KEYS:
            return {"type": "grammar", "grammar": _ebnf(value["json_schema"], any_space)}
        return value | {"json_schema": rewrite(value["json_schema"], in_text)}
    return {key: _tag(inner, any_space) for key, inner in value.items()}


def _ebnf(schema: Any, any_space: bool) -> str:
    import xgrammar

    text = json.dumps(rewrite(schema, in_json), ensure_ascii=False)
    grammar = xgrammar.Grammar.from_json_schema(text, any_whitespace=any_space)
    # xgrammar would leave all escapes out of the automaton of a pattern; `in_json` has those that are right.
    return JSON_PATTERN.sub(r"\1false)", of_four_digits(str(grammar)))


def of_four_digits(text: str) -> str:
    """Replace \\xNN by \\u00NN in a regular expression, or in EBNF that xgrammar wrote: xgrammar reads \\x with any
    number of hexadecimal digits."""
    return re.sub(r"\\(?:x([0-9a-fA-F]{2})|.)", lambda found: f"\\u00{found[1]}" if found[1] else found[0], text)
