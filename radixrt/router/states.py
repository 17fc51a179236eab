"""States of programs, kept by number, and sessions that are paused: what lets a program send only what is new.

    (tenant, scope, number) --> State      when all have more than `limit` bytes, the tenant that has most loses those
                                           that it has not used for longest

A scope is a secret of the client that chose it; with the tenant in the key nobody reaches another's states even by one
that leaked.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, defaultdict
from typing import NamedTuple

from radixrt.messages import GONE
from radixrt.router.said import NOTHING, Piece, State
from radixrt.router.shares import Shares
from radixrt.router.validate import Refused


class Key(NamedTuple):
    """Which state."""

    tenant: str
    scope: str
    number: int


class States:
    """Keeps states within `limit` bytes, all that they share counted once. States of different tenants share nothing.

    Keeping and dropping one takes as long as it has pieces that no other has."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._states: dict[str, OrderedDict[Key, State]] = {}
        """By tenant, the latest used last."""
        self._scopes: dict[tuple[str, str], set[int]] = {}
        self._shares = Shares()

    def __len__(self) -> int:
        return sum(map(len, self._states.values()))

    @property
    def bytes(self) -> int:
        """Memory of all states, about."""
        return self._shares.total

    def get(self, key: Key, field: str = "prompt.state") -> State:
        """A state, which is then the latest used; Refused (GONE) for one that is not known."""
        if key.number == 0:
            return NOTHING
        own = self._states.get(key.tenant, {})
        if key not in own:
            raise Refused(field, f"{field}: state {key.number} is not known (any more)", GONE)
        own.move_to_end(key)
        return own[key]

    def put(self, key: Key, state: State) -> None:
        """Keep a state, in place of what has its key; others may go for it, or itself if it is too large."""
        added = state.size + sum(map(_use, state.ends))  # before the old one goes, which may hold the same pieces
        self._shares.add(key.tenant, added)
        self.drop(key)
        self._states.setdefault(key.tenant, OrderedDict())[key] = state
        self._scopes.setdefault(key[:2], set()).add(key.number)
        while self._shares.total > self._limit:
            self.drop(next(iter(self._states[self._shares.largest()])))

    def drop(self, key: Key) -> None:
        """Forget a state, if it is known."""
        own = self._states.get(key.tenant, {})
        state = own.pop(key, None)
        if state is None:
            return
        if not own:
            del self._states[key.tenant]
        numbers = self._scopes[key[:2]]
        numbers.remove(key.number)
        if not numbers:
            del self._scopes[key[:2]]
        self._shares.add(key.tenant, -state.size - sum(map(_leave, state.ends)))

    def forget(self, tenant: str, scope: str) -> None:
        """Drop all states of a scope."""
        for number in tuple(self._scopes.get((tenant, scope), ())):
            self.drop(Key(tenant, scope, number))

    def check(self) -> None:
        """Assert that bytes and users are what they say."""
        self._shares.check()
        users: Counter[Piece] = Counter()
        sizes: defaultdict[str, int] = defaultdict(int)
        owners: dict[Piece, str] = {}
        for tenant, own in self._states.items():
            assert own, "a tenant without states is not known"
            for state in own.values():
                sizes[tenant] += state.size
                users.update(state.ends)
                assert state.chars == sum(len(part.text) for part in state.parts), "a state knows how long it is"
                for pieces in (state.parts, state.messages):
                    assert all(after.before is before for before, after in itertools.pairwise(pieces)), "a chain each"
                    for piece in pieces:
                        if piece not in owners:
                            sizes[tenant] += piece.size
                            users.update([piece.before] if piece.before else [])
                        assert owners.setdefault(piece, tenant) == tenant, "tenants share nothing"
        assert all(self._shares[tenant] == size for tenant, size in sizes.items()), "bytes are those of all states"
        assert self.bytes == sum(sizes.values()) <= self._limit, "and bounded"
        assert all(piece.users == users[piece] for piece in owners), "a piece knows how many use it"
        known = {
            (t, s): {k.number for k in self._states[t] if k.scope == s}
            for t in self._states
            for _, s, _ in self._states[t]
        }
        assert known == self._scopes, "scopes name their states"


def _use(piece: Piece | None) -> int:
    """One more ends with a piece, or follows it: bytes of those that nobody used before."""
    size = 0
    while piece is not None:
        piece.users += 1
        if piece.users > 1:
            break
        size += piece.size
        piece = piece.before
    return size


def _leave(piece: Piece | None) -> int:
    """The inverse of `_use`: bytes of those that nobody uses any more."""
    size = 0
    while piece is not None:
        piece.users -= 1
        if piece.users:
            break
        size += piece.size
        piece = piece.before
    return size
