"""Lone surrogates: halves of characters, which JSON can escape (`"\\ud800"`), and which are no text."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import msgspec

NO_TEXT = "holds a lone surrogate, which is half of a character and no text"
_LONE = re.compile("[\ud800-\udfff]")


def surrogate_field(value: Any) -> str | None:
    """The field of the first text in a message, or in JSON, that holds one (`messages[2].content`); None: none does."""
    return next(_fields(value, ""), None)


def _fields(value: Any, field: str) -> Iterator[str]:
    if isinstance(value, str):
        if _LONE.search(value):
            yield field
    elif isinstance(value, msgspec.Struct):
        yield from _fields(msgspec.structs.asdict(value), field)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _fields(vars(value), field)
    elif isinstance(value, dict):
        for key, inner in value.items():
            at = f"{field}.{key}".removeprefix(".")
            yield from _fields(key, field)
            yield from _fields(inner, at)
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _fields(inner, f"{field}[{i}]")
