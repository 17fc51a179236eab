"""Checks whether a grammar can be compiled, before a request is sent to a worker.

xgrammar parses it here without a tokenizer; the worker compiles it against its own. Results are cached, so that a
grammar that an agent sends with every request is parsed once; by `owner`, a client's API key, as the time of a check
tells whether the grammar was checked before. The first check imports xgrammar, which takes seconds: `check_aside` does
that off the event loop.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from radixrt.messages import Grammar, GrammarKind
from radixrt.requests.grammar_errors import explained
from radixrt.requests.schema_keywords import DATA, NAMED
from radixrt.requests.schemas.ebnf import compilable
from radixrt.requests.schemas.inexact import Inexact
from radixrt.tokens.errors import FieldError

MAX_BYTES = 64 << 10
"""The most bytes of a grammar's text, without the descriptions in its schemas."""
MAX_TEXT = 256 << 10
"""The most bytes of a grammar's whole text."""
MAX_DEPTH = 64
"""The deepest nesting of objects and arrays in a schema: xgrammar's time grows with its cube."""
MAX_REPEATS = 2000
"""The largest sum of all {n} in a regular expression, in EBNF, or in a schema's patterns: xgrammar's time grows with
its square."""
NOTES = frozenset({"title", "description", "$comment"})
"""Keywords of a schema that are only descriptions."""
PATTERNS = frozenset({"pattern", "grammar"})
"""Keys whose strings are compiled, of a schema and of a structural tag."""
REMEMBERED = 256
"""The most grammars whose result is cached."""

NAMES: dict[GrammarKind, str] = {
    "json": "JSON",
    "json_schema": "the JSON schema",
    "regex": "the regular expression",
    "ebnf": "the EBNF grammar",
    "structural_tag": "the structural tag",
}
REPEAT = re.compile(r"\{\s*(?:\d*\s*,\s*)?(\d{1,9})\d*\s*,?\s*\}")
QUOTED: dict[GrammarKind, re.Pattern[str]] = {
    "regex": re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]", re.S),
    "ebnf": re.compile(r"\"(?:\\.|[^\"\\])*\"|\[(?:\\.|[^\]\\])*\]|#[^\n]*", re.S),
}
"""Parts of a text that hold no repetitions: literals, classes, comments."""
NEEDS_TOKENIZER = "requires tokenizer_info"
"""xgrammar's error for a structural tag that names a token, which only the worker can check."""

_found: OrderedDict[tuple[str, Grammar], str] = OrderedDict()
"""The error of each cached grammar of an owner ("" if there is none), the last used one last."""
_lock = threading.Lock()


def check_grammar(grammar: Grammar, field: str = "grammar", owner: str = "") -> None:
    """Raise FieldError if a grammar cannot be compiled; `field` is its name in the caller's API."""
    found = _found.get((owner, grammar))
    if found is None:
        found = _problem(grammar)
    if len(grammar.text) <= MAX_TEXT:  # longer ones are refused at once, and not worth caching
        _remember((owner, grammar), found)
    if found:
        raise FieldError(field, f"{field}: {found}")


async def check_aside(grammar: Grammar, field: str = "grammar", owner: str = "") -> None:
    """`check_grammar`, in a thread if the result is not cached."""
    if not is_checked(grammar, owner):
        await asyncio.to_thread(_try_out, grammar, owner)
    check_grammar(grammar, field, owner)


def is_checked(grammar: Grammar, owner: str = "") -> bool:
    """Whether the result of `check_grammar` is cached."""
    return (owner, grammar) in _found


def _remember(key: tuple[str, Grammar], found: str) -> None:
    with _lock:
        _found[key] = found
        _found.move_to_end(key)
        while len(_found) > REMEMBERED:
            _found.popitem(last=False)


def _try_out(grammar: Grammar, owner: str) -> None:
    try:
        check_grammar(grammar, owner=owner)
    except FieldError:
        pass  # the result is cached


def _problem(grammar: Grammar) -> str:
    """The error of a grammar; "" if there is none."""
    name = NAMES[grammar.kind]
    if importlib.util.find_spec("xgrammar") is None:
        return "structured output needs xgrammar: pip install 'radixrt[grammar]'"
    try:
        size = len(grammar.text.encode())
    except UnicodeEncodeError:
        return f"{name} is not Unicode: it holds half of a surrogate pair"
    if size > MAX_TEXT:
        return f"{name} has {size} bytes, at most {MAX_TEXT} are served"
    if "\0" in grammar.text:
        return f"{name} holds the character U+0000"
    what = "bytes"
    if grammar.holds_schemas:
        try:
            value = msgspec.json.decode(grammar.text)
        except (msgspec.DecodeError, RecursionError) as error:
            return f"{name} is not JSON: {error}"
        if (depth := _depth(value)) > MAX_DEPTH:
            return f"{name} has {depth} objects and arrays within each other, at most {MAX_DEPTH} are served"
        size, what = len(msgspec.json.encode(_bare(value))), "bytes without descriptions"
        if (repeats := sum(int(n) for pattern in _patterns(value) for n in REPEAT.findall(pattern))) > MAX_REPEATS:
            return f"{name} has patterns that repeat {repeats} times in all, at most {MAX_REPEATS} are served"
    elif (repeats := _repeats(grammar)) > MAX_REPEATS:
        return f"{name} repeats {repeats} times in all, at most {MAX_REPEATS} are served"
    if size > MAX_BYTES:
        return f"{name} has {size} {what}, at most {MAX_BYTES} are served"
    return _parse(grammar)


def _repeats(grammar: Grammar) -> int:
    """The sum of all {n} in a regular expression or EBNF."""
    quoted = QUOTED.get(grammar.kind)
    return sum(map(int, REPEAT.findall(quoted.sub("''", grammar.text)))) if quoted else 0


def _bare(value: Any, named: bool = False) -> Any:
    """A schema, or a value with schemas in it, without NOTES. `named`: its keys are names, not keywords."""
    if isinstance(value, list):
        return [_bare(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    return {
        key: inner if key in DATA and not named else _bare(inner, key in NAMED and not named)
        for key, inner in value.items()
        if named or key not in NOTES or not isinstance(inner, str)
    }


def _patterns(value: Any) -> Iterator[str]:
    """All strings that may be compiled as patterns, wherever they are, since a reference may point anywhere."""
    if isinstance(value, list):
        for inner in value:
            yield from _patterns(inner)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key in PATTERNS and isinstance(inner, str):
                yield inner
            elif key == "patternProperties" and isinstance(inner, dict):
                yield from inner
            yield from _patterns(inner)


def _depth(value: Any) -> int:
    """The nesting depth of objects and arrays."""
    depth, level = 0, [value]
    while level := [inner for inner in level if isinstance(inner, dict | list)]:
        depth += 1
        level = [x for inner in level for x in (inner.values() if isinstance(inner, dict) else inner)]
    return depth


def _parse(grammar: Grammar) -> str:
    import xgrammar

    parse: dict[GrammarKind, Callable[[str], Any]] = {
        "json": lambda _: None,
        "json_schema": lambda _: None,  # `compilable` has parsed it
        "regex": xgrammar.Grammar.from_regex,
        "ebnf": xgrammar.Grammar.from_ebnf,
        "structural_tag": xgrammar.Grammar.from_structural_tag,
    }
    try:
        parse[grammar.kind](compilable(grammar, any_space=True))
    except Inexact as problem:
        return f"{NAMES[grammar.kind]} cannot be enforced: {problem}"
    except Exception as error:  # xgrammar does not document its exceptions
        text = str(error)
        if NEEDS_TOKENIZER not in text:
            return f"{NAMES[grammar.kind]} cannot be compiled: {explained(error)}"
    return ""
