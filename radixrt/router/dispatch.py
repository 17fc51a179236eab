"""Which worker computes a run: the best one now; or none fits, and the run waits until one joins.

    send -> a worker fits: in flight there, under an id of its own --take_back, when the worker was lost--> send
                                                                   --move, when it has no more room there--> send
                                                                   --retry, when it was failed there--> send
         -> none does: it waits until a worker joins               --send_waiting--> send

`drop` ends it, wherever it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

from radixrt.messages import TOKEN_BYTES
from radixrt.router import placement
from radixrt.router.effects import Effect, Order
from radixrt.router.index import Index
from radixrt.router.member import Member, Sent
from radixrt.router.members import Members
from radixrt.router.request import Request, RunState

LEAST_SHARED = 256
"""Tokens: where workers' hits differ by less, nobody is asked who shares them."""
WINDOW_BYTES = 16 * TOKEN_BYTES
"""Of tokens that are compared at the end of a part: it is a price, no more."""
GETTING_ON = 16
"""Tokens: a run that has gained so many from a worker has not been what ended those before it."""
MOST_SHARERS = 64
"""Runs that are looked at, the latest of those that decode."""


class Dispatcher:
    """All runs that are not over, and the workers that they are placed among."""

    def __init__(self, members: Members, index: Index) -> None:
        self.in_flight: dict[int, RunState] = {}
        """By id: runs that a worker has. To be read."""
        self._members = members
        self._index = index
        self._waiting: dict[RunState, None] = {}
        self._last_id = 0

    def __len__(self) -> int:
        """Runs that are in flight or wait for a worker."""
        return len(self.in_flight) + len(self._waiting)

    def send(self, run: RunState, now: float) -> list[Effect]:
        """Send a run to the best worker, or let it wait for one to join."""
        request = run.request
        ids = run.prompt + run.emitted.tobytes() if run.emitted else run.prompt
        tokens = len(ids) // TOKEN_BYTES
        fits = self._fitting(run, tokens)
        if not fits:
            run.waiting_since = now if run.waiting_since is None else run.waiting_since
            self._waiting[run] = None
            return []
        member, hit, best_hit = self._choose(run, ids, tokens, fits, now)
        if run.id < 0:  # for the first time
            run.hit, run.best_hit = hit, best_hit
        self._last_id += 1
        run.id, run.member, run.started, run.waiting_since = self._last_id, member, False, None
        run.sent = len(run.emitted)
        self.in_flight[run.id] = run
        member.dispatched(run.id, Sent(tokens, tokens - hit))
        self._index.computing(member.number, run.id, request.namespace, run.prompt)
        return [Order(member.name, run.order(ids))]

    def _fitting(self, run: RunState, tokens: int) -> dict[int, Member]:
        """By number: workers with room for all that was asked for, else those where it can go on at all."""
        members, missing = self._members.serving(run.request.model).members, run.missing
        if run.failed_by is not None:
            members = [m for m in members if m is not run.failed_by] or members
        if run.request.bounded:
            roomy = {m.number: m for m in members if tokens + missing <= m.token_limit}
            if roomy:
                return roomy
        return {m.number: m for m in members if tokens + min(1, missing) <= m.token_limit}

    def move(self, run: RunState, now: float) -> list[Effect] | None:
        """Send a run that has filled its worker's room before it has all its tokens to one with more; None if it has
        not, or nobody has more."""
        tokens = run.prompt_len + len(run.emitted)
        most = self._members.serving(run.request.model).token_limit
        if run.member is None or run.missing <= 0 or not run.member.token_limit <= tokens < most:
            return None
        self.drop(run)
        run.member, run.counts_hits = None, False
        return self.send(run, now)

    def retry(self, run: RunState, now: float) -> list[Effect] | None:
        """Send a run that its worker has failed, by no fault of its own, to another one: what went wrong there need not
        go wrong elsewhere, and may be another's fault with which it shared a step. None if there is no other, or that
        was tried before."""
        members = self._members.serving(run.request.model).members
        if run.failed_by is not None or not any(m is not run.member for m in members):
            return None
        self.drop(run)
        run.failed_by = run.member
        run.gone()
        return self.send(run, now)

    def _choose(
        self, run: RunState, ids: bytes, tokens: int, fits: dict[int, Member], now: float
    ) -> tuple[Member, int, int]:
        """The worker, the hit expected there, and the best hit of any worker, in tokens."""
        limit = tokens - 1 if run.score_from is None else min(tokens, run.score_from) - 1
        held = self._index.match(run.request.namespace, ids)
        # Whole pages are shared; of the one with the last token a worker computes that token alone.
        hits = {n: min(held.get(n, 0) // m.info.page_size * m.info.page_size, limit) for n, m in fits.items()}
        group = run.request.group
        if len(fits) == 1 and group is None:  # there is nothing to choose
            ((number, hit),) = hits.items()
            return fits[number], hit, hit
        candidates = [member.candidate(hits[number], now) for number, member in fits.items()]
        if group is not None:
            candidates = [group.seen(candidate) for candidate in candidates]
        best, _ = placement.place(tokens, candidates, self._sharers(run, ids, hits.values()))
        if group is not None:
            group.placed(best, tokens - best.hit_tokens)
        return fits[best.worker], best.hit_tokens, max(c.hit_tokens for c in candidates)

    def _sharers(self, run: RunState, ids: bytes, hits: Collection[int]) -> list[int]:
        """For `placement.shared_out`: how many of the latest runs decode behind each part of the longest hit."""
        best = max(hits)
        if best - min(hits) < LEAST_SHARED:
            return []
        counts = [0] * placement.PARTS
        ends = [TOKEN_BYTES * (best * (i + 1) // placement.PARTS) for i in range(placement.PARTS)]
        parts = [(end - WINDOW_BYTES, end, ids[end - WINDOW_BYTES : end]) for end in ends]
        namespace = run.request.namespace
        decoding = (other for other in reversed(self.in_flight.values()) if other.started)
        for other in itertools.islice(decoding, MOST_SHARERS):
            if other.request.namespace == namespace:
                prompt = other.prompt
                for i, (begin, end, part) in enumerate(parts):
                    if prompt[begin:end] != part:
                        break
                    counts[i] += 1
        return counts

    def send_waiting(self, now: float) -> list[Effect]:
        """A worker joined: place what waited. What still fits nowhere keeps its place and its patience."""
        waiting, self._waiting = self._waiting, {}
        effects: list[Effect] = []
        for run in waiting:
            effects += self.send(run, now)
        return effects

    def impatient(self, now: float, seconds: float) -> list[Request]:
        """Requests with a run that has waited longer than that for a worker."""
        return list({run.request: None for run in self._waiting if now - run.waiting_since > seconds})

    def take_back(self, ids: Iterable[int]) -> list[RunState]:
        """The worker of these runs serves them no more: they are nobody's now."""
        runs = [self.in_flight.pop(id) for id in ids]
        for run in runs:
            if len(run.emitted) >= run.sent + GETTING_ON:
                run.losses.clear()
            run.losses.append(run.member)
            run.gone()
        return runs

    def start(self, run: RunState) -> None:
        """Its worker has computed its prompt: from now on the worker's events say what is cached of it."""
        run.started = True
        if run.member is not None:
            run.member.started(run.id)
            self._index.computed(run.member.number, run.id)

    def drop(self, run: RunState) -> None:
        """A run is over, however it ended."""
        if not run.started and run.member is not None:
            self.start(run)
        self.in_flight.pop(run.id, None)
        self._waiting.pop(run, None)
        if run.member is not None:
            run.member.ended(run.id)
