"""Sessions that wait for something outside, a tool: their prefix is kept at a worker until they go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from radixrt.messages import Pin, Unpin
from radixrt.router.effects import Effect, Order
from radixrt.router.numbers import fresh_numbers
from radixrt.router.states import Key

if TYPE_CHECKING:
    from radixrt.report import Report

LONGEST_SECONDS = 3600.0
"""A session that was not heard of for so long has ended without a word."""
MOST_PAUSES = 16384
"""That are known at once; those of the state that paused first go for more."""


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
        self._paused: dict[Key, list[Paused]] = {}
        self._names = fresh_numbers()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def begin(self, state: Key, namespace: str, ids: bytes, seconds: float, worker: str, now: float) -> list[Effect]:
        """A session pauses; the worker that holds its ids, if any does, is to keep them for so many seconds."""
        effects: list[Effect] = []
        while self._count >= MOST_PAUSES and (first := self.end(next(iter(self._paused)), now)):
            effects += first.unpin()
        paused = Paused(next(self._names), state.tenant, len(ids) // 4, now, worker)
        self._paused.setdefault(state, []).append(paused)
        self._count += 1
        if self._report:
            self._report.paused(state.tenant)
        return effects + ([Order(worker, Pin(paused.name, namespace, ids, seconds))] if worker else [])

    def end(self, state: Key, now: float) -> Paused | None:
        """One that has paused there goes on; None if nobody has."""
        waiting = self._paused.get(state)
        if not waiting:
            return None
        paused = waiting.pop()
        self._count -= 1
        if not waiting:
            del self._paused[state]
        if self._report:
            self._report.went_on(paused.tenant, now - paused.since)
        return paused

    def forget(self, tenant: str, scope: str, now: float) -> list[Effect]:
        """All of a scope have ended."""
        return self._end_all([state for state in self._paused if state[:2] == (tenant, scope)], now)

    def expire(self, now: float) -> list[Effect]:
        """Those that nobody has heard of for `LONGEST_SECONDS` have ended."""
        old = [state for state, paused in self._paused.items() if now - paused[-1].since > LONGEST_SECONDS]
        return self._end_all(old, now)

    def _end_all(self, states: list[Key], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for state in states:
            while (paused := self.end(state, now)) is not None:
                effects += paused.unpin()
        return effects
