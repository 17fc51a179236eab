"""Numbers that no other router uses."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator


def fresh_numbers() -> Iterator[int]:
    """Consecutive numbers from a random start below 2^52, to name what workers keep: a worker may still keep things of
    an earlier router when a new one names others. They cannot be guessed."""
    return itertools.count(1 + secrets.randbits(52))
