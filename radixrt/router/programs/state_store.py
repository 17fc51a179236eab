"""Program states, kept by number, so that a program sends only what is new.

    (tenant, scope, number) --> State      beyond `limit` bytes, the tenant with most bytes loses its least recently
                                           used states

A scope is a secret that a client chooses. Because the tenant is part of the key, no tenant can reach another's states,
even by a scope that leaked.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, defaultdict

from radixrt.messages import GONE
from radixrt.requests.validate import Refused
from radixrt.router.programs.prompt_builder import NOTHING, Piece, State
from radixrt.router.programs.saved_states import Key, SavedStates
from radixrt.tokens.quota import Shares

__all__ = ["Key", "ProgramStateStore"]


class ProgramStateStore:
    """Keeps states within `limit` bytes; pieces that several states share count once. States of different tenants share
    nothing. With `saved`, states are also kept on disk, where those that memory has no room for stay.

    Keeping and dropping a state takes time linear in the pieces that no other state has."""

    def __init__(self, limit: int, saved: SavedStates | None = None) -> None:
        self._limit = limit
        self._saved = saved
        self._states: dict[str, OrderedDict[Key, State]] = {}
        """By tenant, the last used one last."""
        self._scopes: dict[tuple[str, str], set[int]] = {}
        self._shares = Shares()

    def __len__(self) -> int:
        return sum(map(len, self._states.values()))

    @property
    def bytes(self) -> int:
        """About the memory of all states."""
        return self._shares.total

    def number(self, tenant: str) -> int:
        """The number of a tenant's states."""
        return len(self._states.get(tenant, ()))

    def bytes_of(self, tenant: str) -> int:
        """About the memory of a tenant's states."""
        return self._shares[tenant]

    def get(self, key: Key, field: str = "prompt.state") -> State:
        """A state in memory, which becomes the last used one. Raises Refused (GONE) if it is not there; state 0 is
        NOTHING."""
        if key.number == 0:
            return NOTHING
        if not self.holds(key):
            raise Refused(field, f"{field}: state {key.number} is not known (any more)", GONE)
        self._states[key.tenant].move_to_end(key)
        if self._saved is not None:
            self._saved.touch(key)
        return self._states[key.tenant][key]

    async def find(self, key: Key, field: str = "prompt.state") -> State:
        """As `get`, also of a state that is only on disk."""
        if self._saved is not None and key.number and not self.holds(key):
            state = await self._saved.load(key)
            if state is not None and not self.holds(key):
                self._keep(key, state)
                return state
        return self.get(key, field)

    def holds(self, key: Key) -> bool:
        """Whether a state is in memory."""
        return key in self._states.get(key.tenant, ())

    @property
    def may_find(self) -> bool:
        """Whether `find` knows more states than `get`."""
        return self._saved is not None

    def put(self, key: Key, state: State, replaces: Key | None = None) -> None:
        """Keep a state, replacing the one of the same key, and that of `replaces`. Others may be dropped from memory
        for it, or itself if it is too large."""
        if replaces is not None:
            self._drop(replaces)
        self._keep(key, state)
        if self._saved is not None:
            self._saved.save(key, state, replaces)

    def drop(self, key: Key) -> None:
        """Forget a state, if it is known."""
        self._drop(key)
        if self._saved is not None:
            self._saved.remove(key)

    def forget(self, tenant: str, scope: str | None = None) -> None:
        """Drop all states of a scope, or of a tenant."""
        for one in [scope] if scope is not None else [s for t, s in self._scopes if t == tenant]:
            for number in tuple(self._scopes.get((tenant, one), ())):
                self._drop(Key(tenant, one, number))
        if self._saved is not None:
            self._saved.forget(tenant, scope)

    def _keep(self, key: Key, state: State) -> None:
        added = state.size + sum(map(_use, state.ends))  # before the old one goes, which may hold the same pieces
        self._shares.add(key.tenant, added)
        self._drop(key)
        self._states.setdefault(key.tenant, OrderedDict())[key] = state
        self._scopes.setdefault(key[:2], set()).add(key.number)
        while self._shares.total > self._limit:
            self._drop(next(iter(self._states[self._shares.largest()])))

    def _drop(self, key: Key) -> None:
        states = self._states.get(key.tenant)
        if states is None or (state := states.pop(key, None)) is None:
            return
        if not states:
            del self._states[key.tenant]
        numbers = self._scopes[key[:2]]
        numbers.remove(key.number)
        if not numbers:
            del self._scopes[key[:2]]
        self._shares.add(key.tenant, -state.size - sum(map(_leave, state.ends)))

    def of_scope(self, tenant: str, scope: str) -> list[State]:
        """The states of a scope, the lowest number first."""
        numbers = sorted(self._scopes.get((tenant, scope), ()))
        return [self._states[tenant][Key(tenant, scope, number)] for number in numbers]

    def check(self) -> None:
        """Assert that the counts of bytes and users are right."""
        self._shares.check()
        users: Counter[Piece] = Counter()
        sizes: defaultdict[str, int] = defaultdict(int)
        owners: dict[Piece, str] = {}
        for tenant, states in self._states.items():
            assert states, "a tenant without states is not known"
            for state in states.values():
                sizes[tenant] += state.size
                users.update(state.ends)
                assert state.chars == sum(len(part.text) for part in state.parts), "a state knows how long it is"
                for pieces in (state.parts, state.messages, state.tools):
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
    """Count one more user of a piece. Returns the bytes of this piece and those before it that had no user."""
    size = 0
    while piece is not None:
        piece.users += 1
        if piece.users > 1:
            break
        size += piece.size
        piece = piece.before
    return size


def _leave(piece: Piece | None) -> int:
    """The inverse of `_use`. Returns the bytes of the pieces that have no user any more."""
    size = 0
    while piece is not None:
        piece.users -= 1
        if piece.users:
            break
        size += piece.size
        piece = piece.before
    return size
