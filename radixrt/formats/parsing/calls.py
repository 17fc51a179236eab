"""A tool call as a JSON object, used by several formats: {"name": "f", "arguments": {...}}."""

from __future__ import annotations

import json
from collections.abc import Collection

from radixrt.formats.parsing.pieces import Sink
from radixrt.formats.parsing.reader import Reader, Steps

ARGUMENTS = ("arguments", "parameters")
NAMES = ("name", "tool_name")
MEMBERS = (*NAMES, *ARGUMENTS, "type", "id", "tool_call_id")
"""The keys that a call may have; the last three are ignored."""


def read_call(reader: Reader, sink: Sink, known: Collection[str] | None = None) -> Steps[bool]:
    """Read a call. Returns False if none comes next; the caller then goes back to where it was. With `known`, only
    calls of these names count.

    Text is taken for a call as soon as its name and the beginning of its arguments, `{"` or `{}`, are there. From then
    on the arguments are whatever the model writes, JSON or not, up to the closing bracket: what was streamed cannot be
    taken back."""
    return (yield from _Call(reader, sink, known).read())


class _Call:
    """A call whose members may come in any order."""

    def __init__(self, reader: Reader, sink: Sink, known: Collection[str] | None) -> None:
        self._reader = reader
        self._sink = sink
        self._known = known
        self._name = ""
        self._held = ""
        """Arguments that came before the name, and are held back until that is known."""
        self._begun = False

    def read(self) -> Steps[bool]:
        """Read the call up to its end, or to where it is malformed. Returns whether it is a call."""
        reader = self._reader
        if not (yield from reader.take("{")):
            return False
        while (yield from self._member()):
            yield from reader.space()
            if (yield from reader.take("}")):
                if self._name and not self._begun:
                    self._begin("{}")
                return self._begun
            if not (yield from reader.take(",")):
                break
        return self._begun

    def _member(self) -> Steps[bool]:
        """Read `"key": value`; False if it is not one of MEMBERS."""
        reader = self._reader
        yield from reader.space()
        key = yield from reader.string()
        if key not in MEMBERS:
            return False
        yield from reader.space()
        if not (yield from reader.take(":")):
            return False
        yield from reader.space()
        if key in ARGUMENTS and not self._begun:
            return (yield from self._arguments())
        value = yield from reader.string()
        if key in NAMES and not self._name:
            return self._named(value)
        return value is not None

    def _named(self, name: str | None) -> bool:
        if not name or (self._known is not None and name not in self._known):
            return False
        self._name = name
        if self._held:
            self._begin(self._held)
        return True

    def _arguments(self) -> Steps[bool]:
        reader = self._reader
        first = yield from reader.peek()
        if first == "{":
            if not (yield from begins_object(reader)):
                return False
            if self._name:
                self._begin("")
                yield from reader.nested(self._sink.arguments)
                return True
            self._held = yield from reader.nested(None)
        elif first == '"':  # some models write the object as a string
            self._held = (yield from reader.string()) or ""
            if not _is_object(self._held):
                return False
        elif not (yield from reader.take("null")):
            return False
        if self._name and self._held:
            self._begin(self._held)
        return True

    def _begin(self, arguments: str) -> None:
        self._begun = True
        self._sink.call(self._name)
        self._sink.arguments(arguments)


def begins_object(reader: Reader) -> Steps[bool]:
    """Whether a JSON object comes next; nothing is read."""
    start = reader.at
    begun = yield from reader.take("{")
    yield from reader.space()
    begun = begun and (yield from reader.peek()) in ('"', "}")
    reader.at = start
    return begun


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
