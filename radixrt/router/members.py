"""The workers that serve: who they are, when they were last heard, what they have to do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from radixrt.messages import Load, Register
from radixrt.router.placement import Candidate

FORGET_SECONDS = 600.0
"""A worker lost by silence may come back this long."""


class Member:
    """One life of one worker. `number` is its owner id in the index, never used for another life."""

    __slots__ = ("asked", "heard", "info", "load", "number", "runs", "unseen_tokens")

    def __init__(self, number: int, info: Register, now: float) -> None:
        self.number = number
        self.info = info
        self.heard = now
        self.asked = now
        """When a snapshot was asked for last."""
        self.load = Load(free_pages=info.total_pages, total_pages=info.total_pages)
        self.runs: dict[int, int] = {}
        """Run id -> tokens it was expected to compute, in the order of dispatch."""
        self.unseen_tokens = 0
        """Tokens of dispatched runs that `load` does not count yet."""

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def token_limit(self) -> int:
        """Tokens the longest sequence may have: by the model, and by what fits the pool."""
        return min(self.info.max_model_len, self.info.total_pages * self.info.page_size)

    def dispatched(self, run: int, uncached: int) -> None:
        self.runs[run] = uncached
        self.unseen_tokens += uncached

    def update(self, load: Load) -> None:
        """Take a newer load. Runs beyond those it counts were sent after it was made: the latest ones."""
        self.load = load
        unseen = len(self.runs) - load.running - load.waiting
        if unseen <= 0:
            self.unseen_tokens = 0
        else:
            self.unseen_tokens = sum(itertools.islice(reversed(self.runs.values()), unseen))

    def candidate(self, hit_tokens: int) -> Candidate:
        load, info = self.load, self.info
        return Candidate(
            worker=self.number,
            hit_tokens=hit_tokens,
            queued_tokens=load.queued_tokens + self.unseen_tokens,
            requests=len(self.runs),
            max_running=max(1, info.max_running),
            free_tokens=(load.free_pages + load.evictable_pages) * info.page_size,
            prefill_rate=load.prefill_rate,
            step_seconds=load.step_seconds,
            empty_tokens=load.free_pages * info.page_size,
        )


class Members:
    """Serving workers by name, and those lost by silence, who may come back."""

    def __init__(self) -> None:
        self._serving: dict[str, Member] = {}
        self._lost: dict[str, Member] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._serving)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._serving.values())

    def get(self, name: str) -> Member | None:
        return self._serving.get(name)

    def known(self, name: str) -> bool:
        """Whether it serves, or may come back."""
        return name in self._serving or name in self._lost

    def lost(self, name: str) -> Member | None:
        return self._lost.get(name)

    def models(self) -> set[str]:
        """Names of all models that are served, or were by a worker that may come back."""
        return {m.info.model for members in (self._serving, self._lost) for m in members.values()}

    def join(self, info: Register, now: float) -> Member:
        """Begin a new life of `info.name`; the one before must have been removed."""
        self._lost.pop(info.name, None)
        member = self._serving[info.name] = Member(next(self._numbers), info, now)
        return member

    def remove(self, name: str, *, may_return: bool) -> Member | None:
        member = self._serving.pop(name, None)
        if not may_return:
            self._lost.pop(name, None)
        elif member is not None:
            self._lost[name] = member
        return member

    def excuse(self, now: float) -> None:
        """The router itself was away (suspended, starved): what it did not hear is nobody's fault."""
        for member in self._serving.values():
            member.heard = now

    def silent(self, now: float, timeout: float) -> list[Member]:
        """Members not heard for `timeout` seconds; forgets those lost very long ago."""
        for name in [name for name, m in self._lost.items() if now - m.heard > FORGET_SECONDS]:
            del self._lost[name]
        return [m for m in self._serving.values() if now - m.heard > timeout]
