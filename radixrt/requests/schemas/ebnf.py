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
from radixrt.requests.schemas.patterns import characters, in_json, in_text
from radixrt.requests.schemas.rewrite import rewrite

JSON_PATTERN = re.compile(r'(Regex\("(?:\\.|[^"\\])*", json_string=)true\)')
COUNTED = re.compile(r'Regex\("counted (\d+) (\d*)", json_string=\w+\)')
BLOCK = 64
"""The characters of a block: more take longer to compile, fewer have more tokens that end in the next block, which are
tried out one by one for a mask."""
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
    return _with_counts(JSON_PATTERN.sub(r"\1false)", of_four_digits(str(grammar))))


def _with_counts(ebnf: str) -> str:
    """Count characters where `in_json` has left a note, in blocks of so few that each has an automaton:

    at most 1000 characters  =  up to 14 blocks of 64, and up to 63 characters  |  15 blocks, and up to 40 characters
    """
    rules: dict[str, str] = {}

    def counted(least: int, most: int | None) -> str:
        pattern = json.dumps(in_json(characters(least, most)))
        return rules.setdefault(f"Regex({pattern}, json_string=false)", f"counted{len(rules)}")

    def written(note: re.Match[str]) -> str:
        blocks, least = divmod(int(note[1]), BLOCK)
        more = int(note[2]) - blocks * BLOCK if note[2] else None
        begin = f"{counted(BLOCK, BLOCK)}{{{blocks}}} " if blocks else ""
        if more is None or more < 2 * BLOCK:
            return begin + counted(least, more)
        last, rest = divmod(more, BLOCK)
        ways = counted(least, BLOCK - 1), f"{counted(BLOCK, BLOCK)}{{1,{last - 1}}} {counted(0, BLOCK - 1)}"
        return f"{begin}({' | '.join(ways)} | {counted(BLOCK, BLOCK)}{{{last}}} {counted(0, rest)})"

    ebnf = COUNTED.sub(written, ebnf)
    return "\n".join([ebnf, *(f"{name} ::= {pattern}" for pattern, name in rules.items())]) if rules else ebnf


def of_four_digits(text: str) -> str:
    """Replace \\xNN by \\u00NN in a regular expression, or in EBNF that xgrammar wrote: xgrammar reads \\x with any
    number of hexadecimal digits."""
    return re.sub(r"\\(?:x([0-9a-fA-F]{2})|.)", lambda found: f"\\u00{found[1]}" if found[1] else found[0], text)
