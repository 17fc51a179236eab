"""The interface of tool call formats, and parts that several share: sections of calls, and elements of xgrammar's
structural tags."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

from radixrt.formats.parsing.pieces import Sink
from radixrt.formats.parsing.reader import Reader, Steps, marks

Schema = dict[str, Any] | bool
Functions = Mapping[str, Schema]
"""The functions that may be called: name -> schema of their arguments."""


class Function(NamedTuple):
    """A function that may be called; `schema` is that of its arguments."""

    name: str
    schema: Schema


class ToolFormat(Protocol):
    """How a family of models writes calls: a parser, and grammars that make a model write them."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Strings that must be in the text for `read`, even if they are special tokens."""

    def new_id(self) -> str:
        """A new id for a call, in the form that the family's chat templates accept."""

    def begins(self, functions: Functions) -> tuple[str, ...]:
        """Strings with which calls of these functions begin within other text."""

    def read(self, reader: Reader, sink: Sink, functions: Functions, hidden: frozenset[str]) -> Steps[None]:
        """Read an answer to its end. Text that turns out to be no call is content, without the marks in `hidden`."""

    @property
    def arguments(self) -> Callable[[dict[str, Any]], dict[str, Any]]:
        """A structural tag's format for arguments of a schema, exactly. Raises Inexact."""

    def forced(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        """A structural tag's format for one call of these functions, or several if `parallel`, and nothing else."""

    def free(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        """A structural tag's format for any text in which calls, if there are any, are of these functions."""


class Framed(ABC):
    """A tool format in which all of an answer stands between marks, also where there are no tools."""

    @abstractmethod
    def with_text(self, text: dict[str, Any]) -> dict[str, Any]:
        """A structural tag's format for an answer whose content is `text`, itself a format."""


def read_section(
    reader: Reader, sink: Sink, around: tuple[str, str], hidden: frozenset[str], read: Callable[[], Steps[bool]],
    begins: tuple[str, ...] = (),
) -> Steps[None]:  # fmt: skip
    """Read an answer whose calls are in sections between the two marks `around`. `read` reads a call, which begins with
    one of `begins`, and returns whether one came next."""
    opening, closing = around
    while mark := (yield from reader.until(marks((opening,), hidden), sink.content)):
        start = reader.at
        if (yield from read()):
            while (yield from read()):
                pass
            if (yield from reader.take(closing)):
                yield from read_again(reader, closing)
            else:
                reader.ends_within((*begins, closing))
        else:
            reader.at = start
            sink.content("" if mark in hidden else mark)


def read_again(reader: Reader, mark: str) -> Steps[None]:
    """Read a mark that is there more than once, after white space."""
    start = reader.at
    while True:
        yield from reader.space()
        if not (yield from reader.take(mark)):
            reader.at = start
            return
        start = reader.at


def read_json(text: str) -> Any:
    """Parse strict JSON. Raises ValueError also for NaN and Infinity, which Python's parser accepts."""
    try:
        return json.loads(text, parse_constant=_refused)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def one_after_another(tags: list[dict[str, Any]], separator: str, parallel: bool) -> dict[str, Any]:
    """A structural tag's format for one of these tags, or several if `parallel`, and nothing else."""
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def in_text(triggers: Sequence[str], tags: list[dict[str, Any]], several: bool) -> dict[str, Any]:
    """A structural tag's format for any text, in which each of `triggers` begins one of these tags. Unless there may be
    `several`, the answer ends with the first."""
    return {"type": "triggered_tags", "triggers": list(triggers), "tags": tags, "stop_after_first": not several}


def constant(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def json_schema(schema: dict[str, Any] | bool) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


def sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "or", "elements": list(elements)}
