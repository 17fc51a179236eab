"""States of programs, kept by number, and sessions that are paused: what lets a program send only what is new.

    (tenant, scope, number) --> State      least recently used ones go when all have more than `limit` bytes

A scope is a secret of the client that chose it; with the tenant in the key nobody reaches another's states even by one
that leaked.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from radixrt.router.said import NOTHING, State
from radixrt.router.validate import Refused

GONE = 410
"""Code of the Error for a state that is not known here (any more)."""


class Key(NamedTuple):
    """Which state."""

    tenant: str
    scope: str
    number: int


class States:
    """Keeps states within `limit` bytes, all that they share counted once."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._states: OrderedDict[Key, State] = OrderedDict()
        """The latest used last."""
        self._scopes: dict[tuple[str, str], set[int]] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._states)

    @property
    def bytes(self) -> int:
        """Memory of all states, about."""
        return self._bytes

    def get(self, key: Key, field: str = "prompt.state") -> State:
        """A state, which is then the latest used; Refused (410) for one that is not known."""
        if key.number == 0:
            return NOTHING
        state = self._states.get(key)
        if state is None:
            raise Refused(field, f"{field}: state {key.number} is not known (any more)", GONE)
        self._states.move_to_end(key)
        return state

    def put(self, key: Key, state: State) -> None:
        """Keep a state, in place of what has its key; others may go for it, or itself if it is too large."""
        self.drop(key)
        self._states[key] = state
        self._scopes.setdefault(key[:2], set()).add(key.number)
        self._bytes += state.size
        for piece in state.pieces:
            self._bytes += 0 if piece.users else piece.size
            piece.users += 1
        while self._bytes > self._limit:
            self.drop(next(iter(self._states)))

    def drop(self, key: Key) -> None:
        """Forget a state, if it is known."""
        state = self._states.pop(key, None)
        if state is None:
            return
        numbers = self._scopes[key[:2]]
        numbers.remove(key.number)
        if not numbers:
            del self._scopes[key[:2]]
        self._bytes -= state.size
        for piece in state.pieces:
            piece.users -= 1
            self._bytes -= 0 if piece.users else piece.size

    def forget(self, tenant: str, scope: str) -> None:
        """Drop all states of a scope."""
        for number in tuple(self._scopes.get((tenant, scope), ())):
            self.drop(Key(tenant, scope, number))

    def check(self) -> None:
        """Assert that bytes and users are what they say."""
        pieces = [piece for state in self._states.values() for piece in state.pieces]
        unique = {id(piece): piece for piece in pieces}
        sizes = sum(piece.size for piece in unique.values()) + sum(s.size for s in self._states.values())
        assert self._bytes == sizes <= self._limit, "bytes are those of all states, and bounded"
        for piece in unique.values():
            assert piece.users == sum(one is piece for one in pieces), "a piece knows how many states hold it"
        known = {(t, s): {k.number for k in self._states if k[:2] == (t, s)} for t, s, _ in self._states}
        assert known == self._scopes, "scopes name their states"
