"""Sessions that wait for something outside, a tool: their prefix is kept at a worker until they go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from radixrt.messages import TOKEN_BYTES, Pin, Unpin
from radixrt.router.effects import Effect, Order
from radixrt.router.numbers import fresh_numbers
from radixrt.router.shares import Shares
from radixrt.router.states import Key

if TYPE_CHECKING:
    from radixrt.report import Report

LONGEST_SECONDS = 3600.0
"""A session that was not heard of for so long has ended without a word."""
MOST_PAUSES = 16384
"""That are known at once; for more, those of the state that paused first go, of the tenant that has most."""


@dataclass(frozen=True, slots=True)
class Paused:
    """One pause of a session of so many tokens. `worker` keeps it under `name`; nobody does if that is empty."""

    name: int
    tenant: str
    tokens: int
    since: float
    worker: str

    def unpin(self) -> list[Effect]:
        """What the worker need not keep any more."""
        return [Order(self.worker, Unpin(self.name))] if self.worker else []


class Pauses:
    """Those that are paused now, by state: branches that have said the same may share one."""

    def __init__(self, report: Report | None) -> None:
        self._report = report
        self._paused: dict[str, dict[Key, list[Paused]]] = {}
        """By tenant; those of a state in the order in which they came."""
        self._shares = Shares()
        self._names = fresh_numbers()

    def __len__(self) -> int:
        return self._shares.total

    def waiting(self, state: Key) -> int:
        """How many have paused there."""
        return len(self._paused.get(state.tenant, {}).get(state, ()))

    def begin(self, state: Key, namespace: str, ids: bytes, seconds: float, worker: str, now: float) -> list[Effect]:
        """A session pauses; the worker that holds its ids, if any does, is to keep them for so many seconds."""
        effects: list[Effect] = []
        while len(self) >= MOST_PAUSES:
            effects += self._drop(next(iter(self._paused[self._shares.largest()])))
        paused = Paused(next(self._names), state.tenant, len(ids) // TOKEN_BYTES, now, worker)
        self._paused.setdefault(state.tenant, {}).setdefault(state, []).append(paused)
        self._shares.add(state.tenant, 1)
        if self._report:
            self._report.paused(state.tenant)
        return effects + ([Order(worker, Pin(paused.name, namespace, ids, seconds))] if worker else [])

    def end(self, state: Key, now: float) -> Paused | None:
        """One that has paused there goes on; None if nobody has."""
        if not self.waiting(state):
            return None
        paused = self._take(state)
        if self._report:
            self._report.went_on(paused.tenant, now - paused.since)
        return paused

    def forget(self, tenant: str, scope: str) -> list[Effect]:
        """All of a scope have ended."""
        states = [state for state in self._paused.get(tenant, ()) if state.scope == scope]
        return [effect for state in states for _ in range(self.waiting(state)) for effect in self._drop(state)]

    def expire(self, now: float) -> list[Effect]:
        """Those that nobody has heard of for `LONGEST_SECONDS` have ended."""
        known = [pair for own in self._paused.values() for pair in own.items()]
        effects: list[Effect] = []
        for state, paused in known:
            while paused and now - paused[0].since > LONGEST_SECONDS:
                effects += self._drop(state, 0)
        return effects

    def _drop(self, state: Key, at: int = -1) -> list[Effect]:
        """One that has paused there is not known any more, and has not gone on."""
        paused = self._take(state, at)
        if self._report:
            self._report.dropped_pause(paused.tenant)
        return paused.unpin()

    def _take(self, state: Key, at: int = -1) -> Paused:
        own = self._paused[state.tenant]
        paused = own[state].pop(at)
        if not own[state]:
            del own[state]
        if not own:
            del self._paused[state.tenant]
        self._shares.add(state.tenant, -1)
        return paused
