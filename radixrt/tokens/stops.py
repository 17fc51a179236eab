"""Finds stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Quiet(NamedTuple):
    """Parts of a text in which no stop string is looked for: from `open` to `close`."""

    open: str
    close: str
    inside: bool = False
    """Whether the text begins in such a part."""
    anywhere: bool = False
    """Whether such parts may begin anywhere, not only at the beginning of the text."""


class StopFinder:
    """Finds the stop string that is complete first, however the text is divided into pushes.

    Of several that end at the same character, the longest is found. Text that may be the beginning of a stop
    string is held back, except with `include`, where the stop string itself is part of the text.

        text     ...every idea. \\nObser|          stop  \\nObservation:
                 emitted........held...
    """

    __slots__ = ("_first_chars", "_held", "_include", "_longest", "_stops", "found")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)  # of equal ends the longest is seen first
        self._first_chars = frozenset(stop[0] for stop in self._stops)
        self._longest = max(map(len, self._stops), default=0)
        self._include = include
        self._held = ""  # the longest end of the text that begins a stop
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Add text; returns the text that can be passed on. After `found` is set, that is ""."""
        held = self._held
        if not held and self._first_chars.isdisjoint(text) and self.found is None:
            return text
        return self._search(held + text, len(held) if self._include else 0)

    def flush(self) -> str:
        """Returns the text held back, at the end of the stream."""
        held, self._held = self._held, ""
        return "" if self._include else held

    def _search(self, text: str, emitted: int) -> str:
        """Search `text`, which begins with the held text, of which `emitted` characters were passed on already."""
        if self.found is not None:
            return ""
        ends = [(at + len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            end, self.found = min(ends, key=lambda pair: pair[0])
            self._held = ""
            return text[emitted : end if self._include else end - len(self.found)]
        self._held = self._beginning(text)
        return text[emitted : len(text) if self._include else len(text) - len(self._held)]

    def _beginning(self, text: str) -> str:
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first_chars:
                end = text[start:]
                if any(stop.startswith(end) for stop in self._stops):
                    return end
        return ""


class LoudStopFinder:
    """A StopFinder for a text whose `quiet` parts are not searched. The beginning of a mark is held back."""

    __slots__ = ("_finder", "_held", "_inside", "_next", "_quiet")

    def __init__(self, finder: StopFinder, quiet: Quiet) -> None:
        self._finder = finder
        self._quiet = quiet
        self._inside = quiet.inside
        self._next: str | None = None
        """The mark at which the current part ends, "" if none does; None until the text has begun."""
        if quiet.inside or quiet.anywhere:
            self._next = quiet.close if quiet.inside else quiet.open
        self._held = ""

    @property
    def found(self) -> str | None:
        return self._finder.found

    def push(self, text: str) -> str:
        """See `StopFinder.push`."""
        text, self._held = self._held + text, ""
        said = ""
        while text and self.found is None:
            if self._next is None:
                begin = text.lstrip()
                if len(begin) < len(self._quiet.open) and self._quiet.open.startswith(begin):
                    self._held = text
                    break
                self._inside = begin.startswith(self._quiet.open)
                self._next = self._quiet.close if self._inside else ""
            part, mark, text = text.partition(self._next) if self._next else (text, "", "")
            if not mark:
                part, self._held = _split(part, self._next)
            said += part + mark if self._inside else self._finder.push(part + mark)
            if mark:
                said += "" if self._inside else self._finder.flush()
                self._inside = not self._inside
                self._next = self._quiet.close if self._inside else self._quiet.open * self._quiet.anywhere
        return said

    def flush(self) -> str:
        """See `StopFinder.flush`."""
        held, self._held = self._held, ""
        return held if self._inside else self._finder.push(held) + self._finder.flush()


def _split(text: str, mark: str) -> tuple[str, str]:
    """`text`, and its end if that is the beginning of `mark`."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-size:]):
            return text[:-size], text[-size:]
    return text, ""
