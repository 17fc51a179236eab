"""Numbers that no other router gives."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator


def fresh_numbers() -> Iterator[int]:
    """Names for what workers keep, one after the other from a place drawn at random below 2^52: a worker may hear of a
    new router's while it keeps an earlier one's, and nobody can tell a number beforehand."""
    return itertools.count(1 + secrets.randbits(52))
