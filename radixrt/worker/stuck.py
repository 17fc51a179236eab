"""Why a request has no next token."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple


class StuckCause(Enum):
    LATE = auto()
    """Its mask is not there in time: it goes on later."""
    GRAMMAR = auto()
    """Its grammar allows no token, or cannot be followed."""
    RESTRICTION = auto()
    """What the request allows and bans leaves no token."""


class Stuck(NamedTuple):
    """`text` is for the client of a request that fails; it begins with the field, if that is the grammar."""

    cause: StuckCause
    text: str = ""


LATE = Stuck(StuckCause.LATE)


def bad_grammar(why: str) -> Stuck:
    return Stuck(StuckCause.GRAMMAR, f"grammar: {why}")
