"""Finds stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence


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
