"""Text that comes in cuts, read as if it were whole.

What reads is a generator, written as for a whole text, and yields where it needs more than has come. It asks only
questions whose answer does not depend on the cuts: `peek` waits for a character, `take` until a literal is there or
ruled out, `until` passes nothing on that may yet be a part of a mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]

_SPACE = re.compile(r"\s*")
_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')
_QUOTED = {"": re.compile(r"""["',()\[\]{}]"""), '"': _INSIDE, "'": re.compile(r"['\\]")}
"""By the quote that has been opened."""


class Reader:
    """`at` is where the reading generator is. It may go back, as long as nothing was passed on since."""

    def __init__(self) -> None:
        self.at = 0
        self.ended = False
        self._text = ""

    def feed(self, text: str) -> None:
        self._text += text

    def rest(self) -> str:
        """All that has come and was not read."""
        rest, self._text, self.at = self._text[self.at :], "", 0
        return rest

    # ------------------------------------------------------------ small things

    def peek(self) -> Steps[str]:
        """The next character; "" at the end."""
        while self.at >= len(self._text) and not self.ended:
            yield
        return self._text[self.at : self.at + 1]

    def take(self, literal: str) -> Steps[bool]:
        """Whether `literal` comes next; it is read then."""
        while not self.ended:
            there = self._text[self.at : self.at + len(literal)]
            if len(there) == len(literal) or not literal.startswith(there):
                break
            yield
        found = self._text.startswith(literal, self.at)
        self.at += len(literal) * found
        return found

    def ends_within(self, literals: Iterable[str]) -> bool:
        """Whether the text has ended, and what is left of it may be the beginning of one of these; it is read then."""
        rest = self._text[self.at :]
        found = self.ended and any(literal.startswith(rest) for literal in literals)
        self.at += len(rest) * found
        return found

    def space(self) -> Steps[None]:
        while True:
            self.at = _SPACE.match(self._text, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self._text) or self.ended:
                return
            yield

    def word(self, characters: re.Pattern[str]) -> Steps[str]:
        """The characters that match, one by one."""
        word = ""
        while (c := (yield from self.peek())) and characters.match(c):
            word += c
            self.at += 1
        return word

    # ------------------------------------------------------------ JSON

    def string(self) -> Steps[str | None]:
        """What a JSON string says; None if none comes next, or a broken one."""
        start = self.at
        if not (yield from self.take('"')):
            return None
        while found := (yield from self._next(_INSIDE)):
            self.at += 1
            if found == '"':
                try:
                    return json.loads(self._text[start : self.at], strict=False)
                except ValueError:
                    return None
            if (yield from self.peek()):
                self.at += 1
        return None

    def nested(self, pass_on: Callable[[str], None] | None) -> Steps[str]:
        """What stands between the bracket that comes next and the one that closes it, both included, however broken
        the JSON within. It goes to `pass_on` as it comes; without, it is returned."""
        if pass_on is not None:
            self._text, self.at = self._text[self.at :], 0
        start, depth, inside = self.at, 0, False
        while found := (yield from self._next(_INSIDE if inside else _OUTSIDE, pass_on)):
            self.at += 1
            if found == "\\":
                if (yield from self.peek()):
                    self.at += 1
            elif found == '"':
                inside = not inside
            else:
                depth += 1 if found in "{[" else -1
                if not depth:
                    break
        if pass_on is None:
            return self._text[start : self.at]
        pass_on(self._text[: self.at])
        return ""

    def _next(self, pattern: re.Pattern[str], pass_on: Callable[[str], None] | None = None) -> Steps[str]:
        """Go to the next match, of one character; "" at the end. Whenever more must be waited for, all the text there
        is goes to `pass_on`, if there is one, and is forgotten."""
        while True:
            if match := pattern.search(self._text, self.at):
                self.at = match.start()
                return match[0]
            self.at = len(self._text)
            if self.ended:
                return ""
            if pass_on is not None:
                pass_on(self._text)
                self._text, self.at = "", 0
            yield

    def literal(self) -> Steps[str]:
        """What stands before the comma or the closing bracket that ends it, neither in quotes nor between brackets of
        its own; it is read. All that is left where the text ends before."""
        start, depth, quote = self.at, 0, ""
        while found := (yield from self._next(_QUOTED[quote])):
            if not quote and not depth and found in ",)]}":
                break
            self.at += 1
            if found == "\\":
                if (yield from self.peek()):
                    self.at += 1
            elif found in "\"'":
                if quote or not self._text[start : self.at - 1][-1:].isalnum():  # an apostrophe opens nothing
                    quote = "" if quote else found
            elif found != ",":
                depth += 1 if found in "([{" else -1
        return self._text[start : self.at]

    # ------------------------------------------------------------ marks

    def until(self, marks: Marks, pass_on: Callable[[str], None]) -> Steps[str]:
        """Go behind the next mark, which is returned; "" at the end. The text before it is passed on."""
        while True:
            match = marks.pattern.search(self._text, self.at)
            if match:
                pass_on(self._text[self.at : match.start()])
                self.at = match.end()
                if match[0] in marks.dropped:
                    continue
                return match[0]
            end = len(self._text) if self.ended else marks.beginning(self._text, self.at)
            pass_on(self._text[self.at : end])
            self._text, self.at = self._text[end:], 0
            if self.ended:
                return ""
            yield


class Marks:
    """Strings to look for; those `dropped` are skipped. No mark may be a part of another."""

    def __init__(self, wanted: Iterable[str], dropped: Iterable[str] = ()) -> None:
        self.wanted = frozenset(wanted)
        self.dropped = frozenset(dropped) - self.wanted
        self._marks = sorted(self.wanted | self.dropped)
        self.pattern = re.compile("|".join(map(re.escape, self._marks)) or "(?!)")
        self._firsts = {mark[0] for mark in self._marks}
        self._longest = max(map(len, self._marks), default=1)

    def beginning(self, text: str, start: int) -> int:
        """Where at the end of `text` a mark may have begun; its length if none has."""
        for at in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[at] in self._firsts and any(mark.startswith(text[at:]) for mark in self._marks):
                return at
        return len(text)


@lru_cache(64)
def marks(wanted: tuple[str, ...], dropped: frozenset[str] = frozenset()) -> Marks:
    """Marks made once."""
    return Marks(wanted, dropped)
