"""Branches of one fork, admitted together: others' requests that come between them do not come between them.

    fork --open--> first branch: its worker notes when it came
                   others: placed as if nothing had come there since, queued as if they had come with the first

Only what is in flight when the fork comes, or comes within `GROUP_SECONDS` of it, can be overtaken so, and by no more
than `MOST_MEMBERS` sequences of a fork: nobody starves.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from radixrt.router.numbers import fresh_numbers
from radixrt.router.placement import Candidate
from radixrt.router.states import Key

GROUP_SECONDS = 1.0
"""After the fork, a request counts for itself again."""
MOST_MEMBERS = 128
"""Sequences that are admitted together."""


class Ahead(NamedTuple):
    """What a worker had to do when the first of a group came, and what was sent there of the group since."""

    tokens: int
    """To compute."""
    requests: int
    wanted: int
    """Tokens, of its cache."""


class Group:
    """One fork. `id` is for workers; `left` requests may still join it, of `room` sequences at most, until the time
    `until`."""

    __slots__ = ("ahead", "id", "left", "room", "until")

    def __init__(self, id: int, left: int, until: float) -> None:
        self.id = id
        self.left = left
        self.room = MOST_MEMBERS
        self.until = until
        self.ahead: dict[int, Ahead] = {}
        """By worker, where there is one of the group."""

    def seen(self, worker: Candidate) -> Candidate:
        """A worker as the group sees it: without what came there after its first."""
        ahead = self.ahead.get(worker.worker)
        if ahead is None:
            return worker
        tokens, requests = min(ahead.tokens, worker.queued_tokens), min(ahead.requests, worker.requests)
        wanted = min(ahead.wanted, worker.wanted_tokens)
        return worker._replace(queued_tokens=tokens, requests=requests, wanted_tokens=wanted)

    def placed(self, worker: Candidate, uncached: int) -> None:
        """One of the group went to `worker`, as it was `seen`, to compute so many tokens."""
        wanted = worker.wanted_tokens + uncached
        self.ahead[worker.worker] = Ahead(worker.queued_tokens + uncached, worker.requests + 1, wanted)


class Groups:
    """Forks whose branches' first requests are still to come, by the state that these begin with."""

    def __init__(self) -> None:
        self._groups: OrderedDict[Key, Group] = OrderedDict()
        self._ids = fresh_numbers()

    def __len__(self) -> int:
        return len(self._groups)

    def open(self, state: Key, count: int, now: float) -> None:
        """`count` branches go on from a state. One alone is no group."""
        self.expire(now)
        if count > 1:
            self._groups[state] = Group(next(self._ids), count, now + GROUP_SECONDS)
            self._groups.move_to_end(state)

    def join(self, state: Key | None, runs: int, now: float) -> Group | None:
        """The group that a request of so many sequences belongs to, which begins with a state; None if none."""
        group = self._groups.get(state) if state else None
        if group is None or now > group.until or runs > group.room:
            return None
        group.left, group.room = group.left - 1, group.room - runs
        if not group.left:
            del self._groups[state]
        return group

    def expire(self, now: float) -> None:
        """Forget those whose time has passed."""
        while self._groups and next(iter(self._groups.values())).until < now:
            self._groups.popitem(last=False)
