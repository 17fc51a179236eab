"""Regular expressions of JSON Schema (ECMA-262), parsed and written as what may stand between the quotes of a JSON
string.

    "^a.?"  --parsed-->  Node, whole text  --in_json-->  'a([^\\x00-\\x1f"\\\\]|\\\\...){0,1}...'

xgrammar takes a `pattern` as a full match of the raw text between the quotes, ignores what it does not know, and
follows `(xa+)?` wrongly; none of that is left in what is written here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from radixrt.requests.schemas.inexact import Inexact

Ranges = tuple[tuple[int, int], ...]
"""Code points, as sorted ranges with both ends; no surrogates."""
LAST = 0x10FFFF
MAX_MATCHED = 256
"""The longest text that is matched."""


MAX_COUNTED = 128
"""The most characters that an automaton counts: each is a state with a mask of its own."""
NOTE = "counted "


class Unsupported(ValueError):
    """A pattern that cannot be followed; says which part."""


def _ranges(pairs: Iterable[tuple[int, int]]) -> Ranges:
    made: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        if made and low <= made[-1][1] + 1:
            made[-1] = made[-1][0], max(made[-1][1], high)
        else:
            made.append((low, high))
    return tuple(made)


def _but(ranges: Ranges) -> Ranges:
    """All characters but these."""
    made, at = [], 0
    for low, high in (*_ranges((*ranges, (0xD800, 0xDFFF))), (LAST + 1, 0)):
        if at < low:
            made.append((at, low - 1))
        at = high + 1
    return tuple(made)


def _common(one: Ranges, other: Ranges) -> Ranges:
    return _but(_ranges((*_but(one), *_but(other))))


def _of(text: str) -> Ranges:
    return _ranges((ord(char), ord(char)) for char in text)


ALL = _but(())
DIGITS: Ranges = ((48, 57),)
WORD = _ranges([(48, 57), (65, 90), (95, 95), (97, 122)])
SPACE = _of("\t\n\v\f\r \xa0\u1680\u2028\u2029\u202f\u205f\u3000")
SPACE = _ranges((*SPACE, (0x2000, 0x200A)))
MAYBE_SPACE = _ranges((*SPACE, (0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF)))
"""White space of ECMA-262 or of Python: neither's `\\S`."""
NAMED_SETS = {
    "d": DIGITS, "D": _but(DIGITS), "w": WORD, "W": _but(WORD), "s": SPACE, "S": _but(MAYBE_SPACE),
}  # fmt: skip
CONTROLS = {"t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r", "0": "\0"}
DOT = _but(_of("\n\r\u2028\u2029"))


@dataclass(frozen=True, slots=True)
class Chars:
    """One character."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Sequence:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Either:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    inner: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Edge:
    """`^` or `$`; only while a pattern is parsed."""

    begin: bool


Node = Chars | Sequence | Either | Repeat | Edge
EMPTY = Sequence(())
NEVER = Either(())
ANYTHING = Repeat(Chars(ALL), 0, None)


def parsed(pattern: str) -> Node:
    """The texts in which a pattern is found, as JSON Schema searches: of the whole text, without edges. Raises
    Unsupported."""
    node = _Parser(pattern).whole()
    return _anchored(node)


def characters(least: int, most: int | None) -> Node:
    """Any text of a length in characters."""
    return Repeat(Chars(ALL), least, most)


def other_than(words: Iterable[str], first: Ranges = ALL, more: Ranges = ALL, empty: bool = True) -> Node:
    """All texts but some: of a `first` character and `more`, or `empty`."""
    rests: dict[str, list[str]] = {}
    for word in words:
        rests.setdefault(word[:1], []).append(word[1:])
    firsts = _of("".join(rests))
    parts: list[Node] = [EMPTY] if empty and "" not in rests else []
    for char, rest in rests.items():
        if char and (begin := _common(_of(char), first)):
            parts.append(Sequence((Chars(begin), other_than(rest, more, more))))
    other = Sequence((Chars(_common(first, _but(firsts))), Repeat(Chars(more), 0, None)))
    return Either((*parts, other)) if parts else other


def without(node: Node, chars: str) -> Node | None:
    """The texts of a node that hold none of some characters; None if there are none."""
    match node:
        case Chars(ranges):
            kept = _common(ranges, _but(_of(chars)))
            return Chars(kept) if kept else None
        case Sequence(parts):
            found = [without(part, chars) for part in parts]
            return None if None in found else Sequence(tuple(x for x in found if x is not None))
        case Either(parts):
            left = tuple(x for part in parts if (x := without(part, chars)) is not None)
            return Either(left) if left else None
        case Repeat(inner, least, most):
            one = without(inner, chars)
            return Repeat(one, least, most) if one is not None else EMPTY if least == 0 else None
    return node


# ---------------------------------------------------------------- parsing


class _Parser:
    """Recursive descent over a pattern."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._depth = 0

    def whole(self) -> Node:
        node = self._either()
        if self._at < len(self._text):
            raise Unsupported("there is a ) without its (")
        return node

    def _take(self, pattern: str) -> re.Match[str] | None:
        found = re.compile(pattern, re.S).match(self._text, self._at)
        if found:
            self._at = found.end()
        return found

    def _either(self) -> Node:
        self._depth += 1
        if self._depth > 64:
            raise Unsupported("its groups are nested too deeply")
        parts = [self._sequence()]
        while self._take(r"\|"):
            parts.append(self._sequence())
        self._depth -= 1
        if all(isinstance(part, Chars) for part in parts):
            return Chars(_ranges(pair for part in parts for pair in part.ranges))  # type: ignore[union-attr]
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def _sequence(self) -> Node:
        parts = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._repeated(self._atom()))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _repeated(self, node: Node) -> Node:
        while found := self._take(r"([*+?])\??|\{(\d+)(,?)(\d*)\}\??"):
            sign, low, comma, high = found.groups()
            if _has_edge(node):
                raise Unsupported("it repeats ^ or $")
            least = {"*": 0, "+": 1, "?": 0}[sign] if sign else int(low)
            most = {"*": None, "+": None, "?": 1}[sign] if sign else int(high) if high else None if comma else least
            if most is not None and most < least:
                raise Unsupported(f"{found[0]} is no range")
            node = Repeat(node, least, most)
        return node

    def _atom(self) -> Node:
        if self._take(r"\("):
            return self._group()
        if self._take(r"\["):
            return Chars(self._set())
        if self._take(r"\^"):
            return Edge(True)
        if self._take(r"\$"):
            return Edge(False)
        if self._take(r"\."):
            return Chars(DOT)
        if self._take(r"\\"):
            return Chars(self._escape(r"bB"))
        if found := self._take(r"[*+?]"):
            raise Unsupported(f"there is nothing before {found[0]} to repeat")
        self._at += 1
        return Chars(_of(self._text[self._at - 1]))

    def _group(self) -> Node:
        if found := self._take(r"\?(?:<?[=!])"):
            raise Unsupported(f"({found[0]} looks around")
        if self._take(r"\?") and not self._take(r":|P?<[A-Za-z_]\w*>"):
            raise Unsupported("(? of this kind is not served")
        node = self._either()
        if not self._take(r"\)"):
            raise Unsupported("there is a ( without its )")
        return node

    def _escape(self, refused: str) -> Ranges:
        """What follows a backslash."""
        if found := self._take(r"u\{([0-9a-fA-F]{1,6})\}|u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})"):
            return self._code(int(found[1] or found[2] or found[3], 16))
        if found := self._take(r"c([A-Za-z])"):
            return _of(chr(ord(found[1]) % 32))
        if (found := self._take(r".")) is None:
            raise Unsupported("it ends with a backslash")
        char = found[0]
        if char in NAMED_SETS:
            return NAMED_SETS[char]
        if char in CONTROLS and not (char == "0" and self._take(r"\d")):
            return _of(CONTROLS[char])
        if char in refused or char.isalnum():
            raise Unsupported(f"\\{char} is not served")
        return _of(char)

    def _code(self, code: int) -> Ranges:
        if 0xD800 <= code < 0xDC00 and (found := self._take(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")):
            code = 0x10000 + ((code - 0xD800) << 10) + int(found[1], 16) - 0xDC00
        if 0xD800 <= code < 0xE000 or code > LAST:
            raise Unsupported(f"{code:#x} is no character")
        return ((code, code),)

    def _set(self) -> Ranges:
        negated = self._take(r"\^") is not None
        made: list[tuple[int, int]] = []
        while not self._take(r"\]"):
            low = self._member()
            if self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = self._member()
                if len(low) != 1 or len(high) != 1 or low[0][0] != low[0][1] or high[0][0] != high[0][1]:
                    made += [*low, *high, (45, 45)]
                    continue
                if high[0][0] < low[0][0]:
                    raise Unsupported("a range in [ ] goes backwards")
                low = ((low[0][0], high[0][0]),)
            made += low
        ranges = _ranges(made)
        if not made and not negated:
            raise Unsupported("[] holds no character")
        return _but(ranges) if negated else _common(ranges, ALL)

    def _member(self) -> Ranges:
        if self._take(r"\\b"):
            return _of("\b")
        if self._take(r"\\"):
            return self._escape("B")
        if (found := self._take(r".")) is None:
            raise Unsupported("there is a [ without its ]")
        return _of(found[0])


# ---------------------------------------------------------------- edges


def _has_edge(node: Node) -> bool:
    match node:
        case Edge():
            return True
        case Sequence(parts) | Either(parts):
            return any(map(_has_edge, parts))
        case Repeat(inner):
            return _has_edge(inner)
    return False


def _anchored(node: Node) -> Node:
    """The whole texts in which a node is found: with anything before and after it, where it has no edge."""
    if isinstance(node, Either):
        return Either(tuple(map(_anchored, node.parts)))
    parts = list(node.parts) if isinstance(node, Sequence) else [node]
    begins = bool(parts) and parts[0] == Edge(True)
    while parts and parts[0] == Edge(True):
        parts.pop(0)
    ends = bool(parts) and parts[-1] == Edge(False)
    while parts and parts[-1] == Edge(False):
        parts.pop()
    for at in (0, -1):
        # An edge of an alternative: each alternative is anchored for itself.
        if parts and isinstance(parts[at], Either) and _has_edge(parts[at]):
            ways = []
            for one in parts[at].parts:  # type: ignore[union-attr]
                inner = one.parts if isinstance(one, Sequence) else (one,)
                rest = (*inner, *parts[1:]) if at == 0 else (*parts[:-1], *inner)
                ways.append(Sequence((*[Edge(True)] * begins, *rest, *[Edge(False)] * ends)))
            return _anchored(Either(tuple(ways)))
        if parts and isinstance(parts[at], Sequence) and _has_edge(parts[at]):
            inner = parts[at].parts  # type: ignore[union-attr]
            rest = (*inner, *parts[1:]) if at == 0 else (*parts[:-1], *inner)
            return _anchored(Sequence((*[Edge(True)] * begins, *rest, *[Edge(False)] * ends)))
    if any(map(_has_edge, parts)):
        raise Unsupported("^ or $ is within it")
    whole: tuple[Node, ...] = (*([] if begins else [ANYTHING]), *parts, *([] if ends else [ANYTHING]))
    return whole[0] if len(whole) == 1 else Sequence(whole)


# ---------------------------------------------------------------- lengths


def lengths(node: Node) -> tuple[int, int | None]:
    """The fewest and the most characters (None: any number)."""
    match node:
        case Chars():
            return 1, 1
        case Sequence(parts):
            found = [lengths(part) for part in parts]
            highs = [high for _, high in found]
            return sum(low for low, _ in found), None if None in highs else sum(x for x in highs if x is not None)
        case Either(parts):
            found = [lengths(part) for part in parts]
            highs = [high for _, high in found]
            most = None if None in highs else max((x for x in highs if x is not None), default=0)
            return min((low for low, _ in found), default=0), most
        case Repeat(inner, least, most):
            low, high = lengths(inner)
            if high == 0 or most == 0:
                return 0, 0
            return low * least, None if high is None or most is None else high * most
    return 0, 0


def within(node: Node, least: int, most: int | None) -> Node | None:
    """The texts of a node that have `least` to `most` characters; None if that has no short form."""
    low, high = lengths(node)
    if low >= least and (most is None or (high is not None and high <= most)):
        return node
    if (most is not None and low > most) or (high is not None and high < least):
        return NEVER
    if isinstance(node, Either):
        parts = [within(part, least, most) for part in node.parts]
        return None if None in parts else Either(tuple(x for x in parts if x is not None and x != NEVER))
    if isinstance(node, Sequence):
        varying = [i for i, part in enumerate(node.parts) if len(set(lengths(part))) > 1]
        if len(varying) != 1:
            return None
        i = varying[0]
        others = low - lengths(node.parts[i])[0]
        inner = within(node.parts[i], max(0, least - others), None if most is None else most - others)
        return inner and Sequence((*node.parts[:i], inner, *node.parts[i + 1 :]))
    if isinstance(node, Repeat):
        size, same = lengths(node.inner)
        if size != same or not size:
            return None
        fewest = max(node.least, -(-least // size))
        highest = [n for n in (node.most, None if most is None else most // size) if n is not None]
        if highest and min(highest) < fewest:
            return NEVER
        return Repeat(node.inner, fewest, min(highest, default=None))
    return None


# ---------------------------------------------------------------- writing

ESCAPED = _ranges([(0, 31), (34, 34), (92, 92)])
"""Characters that JSON strings escape."""
PLAIN = _but(ESCAPED)
ALIKE: tuple[Ranges, ...] = (
    ((0, 0x7FF),),
    ((0x800, 0xFFF), (0x10000, 0x3FFFF)),
    ((0x1000, 0xFFFF), (0x40000, LAST)),
)
"""Characters that may stand in one [ ]: of others together, and of [^...], xgrammar takes bytes that are no UTF-8."""
HEX = "[0-9a-fA-F]"
ANY_ESCAPE = (
    rf"\\([\"\\/bfnrt]|u([0-9abcefABCEF]{HEX}{{3}}|[dD]([0-7]{HEX}{{2}}|[89abAB]{HEX}{{2}}\\u[dD][c-fC-F]{HEX}{{2}})))"
)
"""The escape of any character."""


def in_json(node: Node) -> str:
    """The pattern of the text between the quotes of a JSON string, for an automaton that knows nothing of JSON. If it
    would count far, a note of its parts: `ebnf` counts in blocks."""
    if not _counts_far(node):
        return f"^{_written(node, _json_chars)}$"
    note = [
        [_json_chars(part.inner.ranges), part.least, part.most] if _is_far(part) else _written(part, _json_chars)  # type: ignore[union-attr]
        for part in _parts(node)
    ]  # fmt: skip
    return NOTE + json.dumps(note).encode().hex()  # in hexadecimal, as xgrammar reads it as a pattern


def _counts_far(node: Node) -> bool:
    """Whether an automaton would have to count more than MAX_COUNTED characters, between parts that count less."""
    return any(map(_is_far, _parts(node))) and all(
        _is_far(part) and isinstance(part.inner, Chars) or not _repeats_far(part)  # type: ignore[union-attr]
        for part in _parts(node)
    )


def _parts(node: Node) -> tuple[Node, ...]:
    return node.parts if isinstance(node, Sequence) else (node,)


def _is_far(node: Node) -> bool:
    return isinstance(node, Repeat) and max(node.least, node.most or 0) > MAX_COUNTED


def _repeats_far(node: Node) -> bool:
    match node:
        case Sequence(parts) | Either(parts):
            return any(map(_repeats_far, parts))
        case Repeat(inner):
            return _is_far(node) or _repeats_far(inner)
    return False


def in_text(node: Node) -> str:
    """The pattern of a text that is written as it is, or, for an automaton of xgrammar's that leaves out what JSON
    escapes, of the text between quotes."""
    return f"^{_written(node, _class)}$"


def matches(node: Node, text: str) -> bool:
    """Whether a text is one of a node's; in time that is polynomial, unlike that of `re`. Raises Inexact for a long
    text."""
    if node == ANYTHING:
        return True
    if len(text) > MAX_MATCHED:
        raise Inexact((), f"has names or values of more than {MAX_MATCHED} characters beside patterns")
    return len(text) in _ends(node, text, 0, {})


def _ends(node: Node, text: str, at: int, known: dict[tuple[int, int], set[int]]) -> set[int]:
    """Where the texts of a node that begin at a place in `text` end."""
    key = id(node), at
    if key not in known:
        known[key] = _find_ends(node, text, at, known)
    return known[key]


def _find_ends(node: Node, text: str, at: int, known: dict[tuple[int, int], set[int]]) -> set[int]:
    def step(inner: Node, places: set[int]) -> set[int]:
        return {end for place in places for end in _ends(inner, text, place, known)}

    match node:
        case Chars(ranges):
            fits = at < len(text) and any(low <= ord(text[at]) <= high for low, high in ranges)
            return {at + 1} if fits else set()
        case Sequence(parts):
            places = {at}
            for part in parts:
                places = step(part, places)
            return places
        case Either(parts):
            return {end for part in parts for end in _ends(part, text, at, known)}
        case Repeat(inner, least, most):
            places = {at}
            for _ in range(least):
                if (more := step(inner, places)) == places:
                    break
                places = more
            found = new = places
            for _ in range(len(text) + 1 if most is None else min(most - least, len(text) + 1)):
                new = step(inner, new) - found
                if not new:
                    break
                found = found | new
            return found
    return set()


def _written(node: Node, chars: Callable[[Ranges], str]) -> str:
    match node:
        case Chars(ranges):
            return chars(ranges)
        case Sequence(parts):
            return "".join(_written(part, chars) for part in parts)
        case Either(parts):
            return f"({'|'.join(dict.fromkeys(_written(part, chars) for part in parts))})"
        case Repeat(inner, least, most):
            if most == 0:
                return ""
            text = _written(inner, chars)
            if (least, most) == (1, 1):
                return text
            text = text if isinstance(inner, Chars | Either) else f"({text})"
            if most is None and least < 2:
                return text + "*+"[least]
            # Not ?: xgrammar's automata take `(xa+)?b` for what `ab` matches as well.
            return f"{text}{{{least},{'' if most is None else most}}}"
    raise AssertionError(node)


def _json_chars(ranges: Ranges) -> str:
    if ranges == ALL:
        return f"({_class(PLAIN)}|{ANY_ESCAPE})"
    plain = _common(ranges, PLAIN)
    parts = [_class(plain)] if plain else []
    for low, high in _common(ranges, ESCAPED):
        parts += [json.dumps(chr(code))[1:-1].replace("\\", r"\\").replace('"', r"\"") for code in range(low, high + 1)]
    return parts[0] if len(parts) == 1 and plain else f"({'|'.join(parts)})"


def _class(ranges: Ranges) -> str:
    if not ranges:
        raise Unsupported("a [ ] holds no character")
    parts = [_common(ranges, alike) for alike in ALIKE]
    classes = [f"[{''.join(map(_range, part))}]" for part in parts if part]
    return classes[0] if len(classes) == 1 else f"({'|'.join(classes)})"


def _range(ends: tuple[int, int]) -> str:
    low, high = map(_char, ends)
    return low if ends[0] == ends[1] else f"{low}-{high}"


def _char(code: int) -> str:
    """A character in ASCII: xgrammar makes no automata of other patterns."""
    if code > 0xFFFF:
        return rf"\u{{{code:x}}}"
    if not 0x20 <= code < 0x7F:
        return rf"\u{code:04x}"
    return "\\" + chr(code) if chr(code) in '\\]^-[/"' else chr(code)


def first_text(node: Node) -> str:
    """What all texts of a node begin with, as far as that is plain to see."""
    match node:
        case Chars(((low, high),)) if low == high:
            return chr(low)
        case Sequence(parts):
            text = ""
            for part in parts:
                if not (more := first_text(part)):
                    break
                text += more
                if not isinstance(part, Chars):
                    break
            return text
    return ""
