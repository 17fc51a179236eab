"""Heads of messages: what is to be known of one before it is decoded."""

from __future__ import annotations

from typing import NamedTuple

from radixrt.wire._heads import scan

FINE, MALFORMED, VALUES, NUMBERS, ENTRIES, DEPTH = range(6)
"""Verdicts: the last four name the limit that was exceeded."""


class Head(NamedTuple):
    """The fields of a message that come before it exceeds a limit; a field is empty if it is not there."""

    verdict: int
    id: int | None
    type: bytes
    key: bytes
    """The field `api_key`."""
    field: bytes
    """The field, and its own field, that exceeds the limit."""
    inner: bytes

    @property
    def path(self) -> str:
        """`field` and `inner` as one, such as `prompt.messages`; empty if they are no names."""
        parts = [part.decode("ascii", "replace") for part in (self.field, self.inner) if part]
        return ".".join(parts) if all(part.isidentifier() and len(part) <= 64 for part in parts) else ""


def read_head(message: bytes, values: int, numbers: int, entries: int, depth: int) -> Head:
    """Read a map in MessagePack, without decoding it, up to where it ends or holds more than so many `values` (maps,
    arrays, strings, bytes), `numbers` (with literals), `entries` (maps and arrays in one array), or a `depth`."""
    return Head(*scan(message, values, numbers, entries, depth))
