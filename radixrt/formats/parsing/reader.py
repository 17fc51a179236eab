"""Reads text that arrives in parts as if it were whole.

A parser is a generator, written as for a whole text, which yields when it needs more text. It uses only operations
whose result does not depend on how the text is divided: `peek` waits for a character, `take` until a literal is there
or ruled out, `until` passes nothing on that may be a part of a mark.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Generator, Iterable
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]

_SPACE = re.compile(r"\s*")
_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')
_QUOTED = {"": re.compile(r"""["',()\[\]{}]"""), '"': _INSIDE, "'": re.compile(r"['\\]")}
"""What to look for next, by the opened quote."""


class Reader:
    """The text so far. `at` is the position of the parser, which may go back if nothing was passed on since."""

    def __init__(self) -> None:
        self.at = 0
        self.ended = False
        self._text = ""

    def feed(self, text: str) -> None:
        self._text += text

    def rest(self) -> str:
        """The text that has arrived and was not read."""
        rest, self._text, self.at = self._text[self.at :], "", 0
        return rest

    # ------------------------------------------------------------ small things

    def peek(self) -> Steps[str]:
        """The next character; "" at the end."""
        while self.at >= len(self._text) and not self.ended:
            yield
        return self._text[self.at : self.at + 1]

    def take(self, literal: str) -> Steps[bool]:
        """Read `literal` if it comes next; returns whether it does."""
        while not self.ended:
            there = self._text[self.at : self.at + len(literal)]
            if len(there) == len(literal) or not literal.startswith(there):
                break
            yield
        found = self._text.startswith(literal, self.at)
        self.at += len(literal) * found
        return found

    def ends_within(self, literals: Iterable[str]) -> bool:
        """Whether the text has ended, and the rest of it is the beginning of one of these, which is then read."""
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
        """Read the characters that match, one by one."""
        word = ""
        while (c := (yield from self.peek())) and characters.match(c):
            word += c
            self.at += 1
        return word

    # ------------------------------------------------------------ JSON

    def string(self) -> Steps[str | None]:
        """Read a JSON string; returns its value, None if none comes next, or an invalid one."""
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
        """Read from the next bracket to the one that closes it, both included, even if the JSON between is invalid. The
        text is passed to `pass_on` as it arrives; without that, it is returned."""
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
        """Go to the next match of `pattern`, one character, and return it; "" at the end. While waiting, the text so
        far is passed to `pass_on`, if given, and dropped."""
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
        """Read a value up to the comma or closing bracket after it; those in its own quotes and brackets do not count.
        If the text ends before, the rest of it."""
        start, depth, quote = self.at, 0, ""
        while found := (yield from self._next(_QUOTED[quote])):
            if not quote and not depth and found in ",)]}":
                break
            self.at += 1
            if found == "\\":
                if (yield from self.peek()):
                    self.at += 1
            elif found in "\"'":
                if quote or not self._text[start : self.at - 1][-1:].isalnum():  # an apostrophe is no quote
                    quote = "" if quote else found
            elif found != ",":
                depth += 1 if found in "([{" else -1
        return self._text[start : self.at]

    # ------------------------------------------------------------ marks

    def until(self, marks: Marks, pass_on: Callable[[str], None]) -> Steps[str]:
        """Read up to and including the next mark, and return that; "" at the end. The text before it is passed on."""
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

    def ahead(self, marks: Marks, at: int, most: int | None = None) -> Steps[tuple[str, int]]:
        """The next mark from position `at` on, and its position; ("", the end) if there is none, within `most`
        characters if that is given. Nothing is read."""
        end = sys.maxsize if most is None else at + most
        while True:
            if match := marks.pattern.search(self._text, at, end):
                return match[0], match.start()
            if self.ended or len(self._text) >= end:
                return "", min(len(self._text), end)
            at = marks.beginning(self._text, at)
            yield

    def between(self, start: int, end: int) -> str:
        """The text between two positions."""
        return self._text[start:end]


class Marks:
    """Strings to look for; `dropped` ones are skipped. No mark may contain another."""

    def __init__(self, wanted: Iterable[str], dropped: Iterable[str] = ()) -> None:
        self.wanted = frozenset(wanted)
        self.dropped = frozenset(dropped) - self.wanted
        self._marks = sorted(self.wanted | self.dropped)
        self.pattern = re.compile("|".join(map(re.escape, self._marks)) or "(?!)")
        self._firsts = {mark[0] for mark in self._marks}
        self._longest = max(map(len, self._marks), default=1)

    def beginning(self, text: str, start: int) -> int:
        """Where at the end of `text` a mark may begin; len(text) if none does."""
        for at in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[at] in self._firsts and any(mark.startswith(text[at:]) for mark in self._marks):
                return at
        return len(text)


@lru_cache(64)
def marks(wanted: tuple[str, ...], dropped: frozenset[str] = frozenset()) -> Marks:
    """Cached Marks."""
    return Marks(wanted, dropped)
