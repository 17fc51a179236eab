"""What cannot be enforced of a JSON schema."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """A schema, and where it is in the whole one: the keys from the root."""

    schema: object
    path: tuple[str | int, ...]


class Inexact(ValueError):
    """A schema asks for what cannot be enforced exactly. `path`: the keys from the root to what asks for it."""

    def __init__(self, path: tuple[str | int, ...], why: str) -> None:
        super().__init__(f"{place(path)} {why}")
        self.path = path


def place(path: tuple[str | int, ...]) -> str:
    """A JSON pointer."""
    return "#" + "".join(f"/{str(key).replace('~', '~0').replace('/', '~1')}" for key in path)
