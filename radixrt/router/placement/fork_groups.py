"""Branches of one fork are placed and queued together, even if other clients' requests arrive between them.

    fork --open--> first branch: its worker notes its arrival
                   others: placed as if nothing else had arrived there since, queued as if they had arrived with the
                   first

Other requests can be overtaken in this way only if they are in flight when the fork arrives or arrive within
GROUP_SECONDS of it, and by at most MAX_GROUP_SEQUENCES sequences of a fork, so that nobody starves.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from radixrt.router.numbers import fresh_numbers
from radixrt.router.placement.cost import Candidate
from radixrt.router.programs.state_store import Key

GROUP_SECONDS = 1.0
"""How long after the fork requests may join its group."""
MAX_GROUP_SEQUENCES = 128
"""The most sequences of a group."""


class Ahead(NamedTuple):
    """The load of a worker when the first request of a group arrived there, plus that of the group's own requests."""

    tokens: int
    """Uncomputed tokens."""
    requests: int
    wanted: int
    """See Candidate.wanted_tokens."""


class Group:
    """The group of one fork. `id` names it for workers. Until the time `until`, `left` more requests may join it, with
    at most `room` sequences in all."""

    __slots__ = ("ahead", "id", "left", "room", "until")

    def __init__(self, id: int, left: int, until: float) -> None:
        self.id = id
        self.left = left
        self.room = MAX_GROUP_SEQUENCES
        self.until = until
        self.ahead: dict[int, Ahead] = {}
        """By worker that has requests of the group."""

    def at_arrival(self, worker: Candidate) -> Candidate:
        """A worker as the group's requests see it: without the other requests that arrived there after the group's
        first."""
        ahead = self.ahead.get(worker.worker)
        if ahead is None:
            return worker
        tokens, requests = min(ahead.tokens, worker.queued_tokens), min(ahead.requests, worker.requests)
        wanted = min(ahead.wanted, worker.wanted_tokens)
        return worker._replace(queued_tokens=tokens, requests=requests, wanted_tokens=wanted)

    def placed(self, worker: Candidate, uncached: int) -> None:
        """A request of the group went to `worker`, a result of `at_arrival`, to compute `uncached` tokens."""
        wanted = worker.wanted_tokens + uncached
        self.ahead[worker.worker] = Ahead(worker.queued_tokens + uncached, worker.requests + 1, wanted)


class Groups:
    """The forks whose branches may still join their group, by the state that the branches begin with."""

    def __init__(self) -> None:
        self._groups: OrderedDict[Key, Group] = OrderedDict()
        self._ids = fresh_numbers()

    def __len__(self) -> int:
        return len(self._groups)

    def open(self, state: Key, count: int, now: float) -> None:
        """Open the group of a fork of a state into `count` branches. A single one is no group."""
        self.expire(now)
        if count > 1:
            self._groups[state] = Group(next(self._ids), count, now + GROUP_SECONDS)
            self._groups.move_to_end(state)

    def join(self, state: Key | None, runs: int, now: float) -> Group | None:
        """Add a request of `runs` sequences, whose prompt begins with `state`, to its group; None if there is none."""
        group = self._groups.get(state) if state else None
        if state is None or group is None or now > group.until or runs > group.room:
            return None
        group.left, group.room = group.left - 1, group.room - runs
        if not group.left:
            del self._groups[state]
        return group

    def expire(self, now: float) -> None:
        """Forget groups whose time has passed."""
        while self._groups and next(iter(self._groups.values())).until < now:
            self._groups.popitem(last=False)
