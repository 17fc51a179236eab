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
from radixrt.requests.schemas.patterns import NOTE, in_json, in_text
from radixrt.requests.schemas.rewrite import rewrite

JSON_PATTERN = re.compile(r'(Regex\("(?:\\.|[^"\\])*", json_string=)true\)')
COUNTED = re.compile(rf'Regex\("{NOTE}([0-9a-f]+)", json_string=\w+\)')
BLOCK = 64
"""The characters of a block: more take longer to compile, fewer have more tokens that end in the next block, which are
tried out one by one for a mask. With 65,024 tokens: 1.3 to 1.7 s for any length, 0.09 ms a mask, and 24 ms at most at
the end of a block."""
RAW = "raw"
"""The style of strings of a format without quotes."""
QUOTED = re.compile(r'^(root ::= .*?)"\\"" (.*) "\\""', re.M)
ESCAPED_QUOTE = r'"\\" "\""', r'"\""'
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
        if value.get("style") == RAW:
            return {"type": "grammar", "grammar": _ebnf(value["json_schema"], any_space, quoted=False)}
        return value | {"json_schema": rewrite(value["json_schema"], in_text)}
    return {key: _tag(inner, any_space) for key, inner in value.items()}


def _ebnf(schema: Any, any_space: bool, quoted: bool = True) -> str:
    """The EBNF of a schema; unless `quoted`, of the text of strings of a format."""
    import xgrammar

    text = json.dumps(rewrite(schema, in_json), ensure_ascii=False)
    grammar = xgrammar.Grammar.from_json_schema(text, any_whitespace=any_space)
    # xgrammar would leave all escapes out of the automaton of a pattern; `in_json` has those that are right.
    ebnf = _with_counts(JSON_PATTERN.sub(r"\1false)", of_four_digits(str(grammar))))
    return ebnf if quoted else QUOTED.sub(r"\1\2", ebnf).replace(*ESCAPED_QUOTE)


def _with_counts(ebnf: str) -> str:
    """Count characters where `in_json` has left a note, in blocks of so few that each has an automaton:

    at most 1000 characters  =  up to 14 blocks of 64, and up to 63 characters  |  15 blocks, and up to 40 characters
    """
    rules: dict[str, str] = {}

    def rule(pattern: str) -> str:
        if not pattern:
            return '""'
        return rules.setdefault(f"Regex({json.dumps(pattern)}, json_string=false)", f"counted{len(rules)}")

    def counted(one: str, least: int, most: int | None) -> str:
        def some(low: int, high: int | None) -> str:
            return rule("" if high == 0 else f"{one}{{{low},{'' if high is None else high}}}")

        blocks, least = divmod(least, BLOCK)
        most = most if most is None else most - blocks * BLOCK
        begin = f"{some(BLOCK, BLOCK)}{{{blocks}}} " if blocks else ""
        if most is None or most < 2 * BLOCK:
            return begin + some(least, most)
        last, rest = divmod(most, BLOCK)
        ways = some(least, BLOCK - 1), f"{some(BLOCK, BLOCK)}{{1,{last - 1}}} {some(0, BLOCK - 1)}"
        return f"{begin}({' | '.join(ways)} | {some(BLOCK, BLOCK)}{{{last}}} {some(0, rest)})"

    def written(note: re.Match[str]) -> str:
        parts = json.loads(bytes.fromhex(note[1]))
        return " ".join(rule(part) if isinstance(part, str) else counted(*part) for part in parts)

    ebnf = COUNTED.sub(written, ebnf)
    return "\n".join([ebnf, *(f"{name} ::= {pattern}" for pattern, name in rules.items())]) if rules else ebnf


def of_four_digits(text: str) -> str:
    """Replace \\xNN by \\u00NN in a regular expression, or in EBNF that xgrammar wrote: xgrammar reads \\x with any
    number of hexadecimal digits."""
    return re.sub(r"\\(?:x([0-9a-fA-F]{2})|.)", lambda found: f"\\u00{found[1]}" if found[1] else found[0], text)
