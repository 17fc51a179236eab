"""Pauses: a program waits for something outside, such as a tool, and a worker keeps its prefix until it continues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from radixrt.messages import TOKEN_BYTES, Pin, Unpin
from radixrt.router.core.effects import Effect, Order
from radixrt.router.numbers import fresh_numbers
from radixrt.router.programs.state_store import Key
from radixrt.tokens.quota import Shares

if TYPE_CHECKING:
    from radixrt.report import Report

LONGEST_SECONDS = 3600.0
"""A program that has not continued after this time is taken to have ended."""
MAX_PAUSES = 16384
"""The most pauses that are kept. Beyond that the oldest ones of the tenant with most pauses are dropped."""


@dataclass(frozen=True, slots=True)
class Paused:
    """One pause of a state of `tokens` tokens. `worker` pins them under `name`; if it is empty, no worker does."""

    name: int
    tenant: str
    tokens: int
    since: float
    worker: str

    def unpin(self) -> list[Effect]:
        """The order that releases the worker's pin, if there is one."""
        return [Order(self.worker, Unpin(self.name))] if self.worker else []


class Pauses:
    """The current pauses, by state. Several branches may pause in the same state."""

    def __init__(self, report: Report | None) -> None:
        self._report = report
        self._paused: dict[str, dict[Key, list[Paused]]] = {}
        """By tenant and state, in order of time."""
        self._shares = Shares()
        self._names = fresh_numbers()

    def __len__(self) -> int:
        return self._shares.total

    def number(self, tenant: str) -> int:
        """The number of a tenant's pauses."""
        return self._shares[tenant]

    def waiting(self, state: Key) -> int:
        """The number of pauses of a state."""
        return len(self._paused.get(state.tenant, {}).get(state, ()))

    def begin(self, state: Key, namespace: str, ids: bytes, seconds: float, worker: str, now: float) -> list[Effect]:
        """Begin a pause; `worker`, if any, is ordered to pin the `ids` for `seconds`."""
        effects: list[Effect] = []
        while len(self) >= MAX_PAUSES:
            effects += self._drop(next(iter(self._paused[self._shares.largest()])))
        paused = Paused(next(self._names), state.tenant, len(ids) // TOKEN_BYTES, now, worker)
        self._paused.setdefault(state.tenant, {}).setdefault(state, []).append(paused)
        self._shares.add(state.tenant, 1)
        if self._report:
            self._report.paused(state.tenant)
        return effects + ([Order(worker, Pin(paused.name, namespace, ids, seconds))] if worker else [])

    def end(self, state: Key, now: float) -> Paused | None:
        """End a pause of a state; None if there is none."""
        if not self.waiting(state):
            return None
        paused = self._take(state)
        if self._report:
            self._report.went_on(paused.tenant, now - paused.since)
        return paused

    def forget(self, tenant: str, scope: str | None = None) -> list[Effect]:
        """Drop all pauses of a scope, or of a tenant."""
        states = [state for state in self._paused.get(tenant, ()) if scope is None or state.scope == scope]
        return [effect for state in states for _ in range(self.waiting(state)) for effect in self._drop(state)]

    def expire(self, now: float) -> list[Effect]:
        """Drop the pauses that are older than LONGEST_SECONDS."""
        known = [pair for own in self._paused.values() for pair in own.items()]
        effects: list[Effect] = []
        for state, paused in known:
            while paused and now - paused[0].since > LONGEST_SECONDS:
                effects += self._drop(state, 0)
        return effects

    def _drop(self, state: Key, at: int = -1) -> list[Effect]:
        """Drop a pause without counting it as continued."""
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
