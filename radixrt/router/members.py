"""The workers that serve: how they join, fall silent, come back and leave, and what they are told of it.

    register -> serving -> not heard for `timeout` seconds, or not reached: lost -> heard again: serving, a new life
                        -> leave: forgotten                                      -> FORGET_SECONDS: forgotten

Each life has a number in the index, and the runs that were sent to it; where these go on is not decided here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from radixrt.messages import Abort, Register, Snapshot, StepDone
from radixrt.router.effects import Effect, Order
from radixrt.router.index import Index
from radixrt.router.member import Member, Process, process
from radixrt.router.record import Counters

FORGET_SECONDS = 600.0
"""A worker lost by silence may come back this long."""
SNAPSHOT_SECONDS = 10.0
"""Until a snapshot that has not come is asked for again: it was lost with a connection."""
MOST_REPLACED = 16
"""Processes that are known to have had a name before another took it."""


class Serving(NamedTuple):
    """The workers that serve a model."""

    members: list[Member]
    vocab_size: int
    """Token ids that it takes; 0 if no worker says so."""
    token_limit: int
    """Tokens that the longest sequence may have on the roomiest of them."""


class Members:
    """Serving workers by name, and those lost by silence, who may come back."""

    def __init__(self, index: Index, counters: Counters, timeout: float) -> None:
        self._index = index
        self._counters = counters
        self._timeout = timeout
        self._serving: dict[str, Member] = {}
        self._lost: dict[str, Member] = {}
        self._by_model: dict[str, Serving] = {}
        """Of models that were asked for since a worker came or went."""
        self._numbers = itertools.count()
        self._last_look: float | None = None

    def __len__(self) -> int:
        return len(self._serving)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._serving.values())

    def known(self, name: str) -> bool:
        """Whether it serves, or may come back."""
        return name in self._serving or name in self._lost

    def models(self) -> set[str]:
        """Names of all models that are served, or were by a worker that may come back."""
        return {m.info.model for members in (self._serving, self._lost) for m in members.values()}

    def serving(self, model: str) -> Serving:
        """Who serves a model now. To be read."""
        found = self._by_model.get(model)
        if found is None:
            members = [member for member in self if member.info.model == model]
            vocab_size = max((m.info.vocab_size for m in members), default=0)
            found = Serving(members, vocab_size, max((m.token_limit for m in members), default=0))
            if members:  # callers may ask for any name
                self._by_model[model] = found
        return found

    # ------------------------------------------------------------ come and go

    def register(self, info: Register, now: float) -> tuple[list[int], list[Effect]]:
        """A worker joins. The same name of another process is a new life of it; of the same one, its cache lives on.
        The runs that its life before leaves behind, and what the worker is told."""
        before = self._serving.get(info.name)
        again = before is not None and before.process == process(info)
        if known := before or self._lost.get(info.name):
            known.blameless = known.process == process(info)
        replaced = self._replaced_by(info)
        take_out = self._take_out if again else self.remove  # a process that has its own name again is not lost
        orphans = take_out(info.name, may_return=False)
        member = self._join(info, now, replaced, fresh=not again)
        if not again:
            return orphans, []
        # It may have taken them after it had let go of all.
        return orphans, [*_abort(info.name, orphans), *self._ask_snapshot(member, now)]

    def revive(self, name: str, now: float) -> list[Effect]:
        """One that was lost by silence speaks again: a new life, after what it still computes is stopped. What it is
        told; nothing if it may not come back."""
        lost = self._lost.pop(name, None)
        if lost is None:
            return []
        lost.blameless = True
        member = self._join(lost.info, now, lost.replaced, fresh=False)
        member.next_step = None
        return [*_abort(name, list(lost.runs)), *self._ask_snapshot(member, now)]

    def remove(self, name: str, *, may_return: bool, planned: bool = False) -> list[int]:
        """A worker serves no more: the runs that it leaves behind. `planned`: it was told to go."""
        if name in self._serving:
            self._counters.workers_lost += 1
            self._serving[name].blameless = planned
        return self._take_out(name, may_return=may_return)

    def _take_out(self, name: str, *, may_return: bool) -> list[int]:
        member = self._serving.pop(name, None)
        self._by_model.clear()
        if not may_return:
            self._lost.pop(name, None)
        elif member is not None:
            self._lost[name] = member
        if member is None:
            return []
        self._index.drop_worker(member.number)
        return list(member.runs)

    def speaks_for(self, name: str, pid: int, life: int) -> bool:
        """Whether a process is the one that is called so, and not one before it."""
        member = self._serving.get(name) or self._lost.get(name)
        return member is None or member.is_process(pid, life)

    def is_replaced(self, info: Register) -> bool:
        """Whether another process has taken its name since it joined."""
        member = self._serving.get(info.name)
        return member is not None and process(info) in member.replaced

    def _replaced_by(self, info: Register) -> tuple[Process, ...]:
        """The last processes that were called so, but for its own."""
        before = self._serving.get(info.name) or self._lost.get(info.name)
        known = () if before is None else (*before.replaced, before.process)
        return tuple(one for one in known if one != process(info))[-MOST_REPLACED:]

    def _join(self, info: Register, now: float, replaced: tuple[Process, ...], *, fresh: bool) -> Member:
        """Begin a new life; the one before is over."""
        member = self._serving[info.name] = Member(next(self._numbers), info, now, replaced)
        self._by_model.clear()
        self._index.add_worker(member.number, fresh=fresh)
        return member

    # ------------------------------------------------------------ what is heard of them

    def hear(self, name: str, now: float) -> Member | None:
        """A worker has spoken; None if it does not serve."""
        member = self._serving.get(name)
        if member is not None:
            member.heard = now
        return member

    def mirror(self, member: Member, message: StepDone, now: float) -> list[Effect]:
        """Take the events of a worker into the index."""
        return [] if self._index.apply(member.number, message) else self._ask_snapshot(member, now)

    def silent(self, now: float) -> list[str]:
        """Names of those not heard for too long; forgets those lost very long ago. To be called about once a second: if
        it was not, the router itself was away (suspended, starved), and what it did not hear is nobody's fault."""
        if self._last_look is not None and now - self._last_look > self._timeout / 2:
            for member in self:
                member.heard = now
        self._last_look = now
        for name in [name for name, m in self._lost.items() if now - m.heard > FORGET_SECONDS]:
            del self._lost[name]
        return [m.name for m in self if now - m.heard > self._timeout]

    def ask_again(self, now: float) -> list[Effect]:
        """Ask for the snapshots that have not come."""
        orders: list[Effect] = []
        for member in self:
            if now - member.asked > SNAPSHOT_SECONDS and self._index.awaits_snapshot(member.number):
                orders += self._ask_snapshot(member, now)
        return orders

    def _ask_snapshot(self, member: Member, now: float) -> list[Effect]:
        self._counters.snapshots += 1
        member.asked = now
        return [Order(member.name, Snapshot())]


def _abort(name: str, runs: list[int]) -> list[Effect]:
    return [Order(name, Abort(runs))] if runs else []
