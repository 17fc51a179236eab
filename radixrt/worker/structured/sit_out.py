"""Requests that sit out: the steps go on without them until the mask for their next token is there. A running one keeps
its row and pages; its last token is computed again afterwards, for its logits. One that waits is parked beside the
queue.

    running --late, or slow--> sitting --mask there--> running          waiting <--> parked
                                  |
                                  +--takes too long, or cannot go on--> fails
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

from radixrt.worker.cache.page_cache import PageCache
from radixrt.worker.request import Request
from radixrt.worker.scheduler.queue import Waiting
from radixrt.worker.scheduler.running import Running
from radixrt.worker.structured.fair import FairThreads, Job
from radixrt.worker.stuck import Stuck, bad_grammar

AT_ONCE = 4
"""The most threads that make masks beside the loop, but for those that a step left behind."""
AT_ONCE_OF_TENANT = 2
"""How many of them may work for one tenant. A call that takes too long cannot be stopped: it ends by itself, as each
token's mask takes only some times longer than the one before."""
MAX_MASK_SECONDS = 3.0
"""The longest that one token's mask and forced text may take. A worker of ordinary speed makes 100,000 masks in it."""
MAX_SITTING_SECONDS = 30.0
"""The longest that a request sits out at once, with its wait for a thread."""
MAX_CPU_SECONDS = 20.0
"""The CPU time that all masks of a request may take together, but for CPU_SECONDS_A_TOKEN of each token."""
CPU_SECONDS_A_TOKEN = 0.05
STRIKE_SECONDS = 60.0
"""So long after a mask was slow, new requests of its tenant are planned only when their mask is there, unless their
grammar is ordinary: otherwise each of many requests could delay a step once."""
MAX_STRIKES = 1024
"""The most tenants that this is remembered of."""
TOO_SLOW = "it is too ambiguous, or too large, to be followed"


@dataclass(slots=True)
class _Seat:
    """A request that sits out. `jump`: whether to look for forced text after its tokens. `since`: in seconds of
    time.monotonic(). `job`: what makes the mask; None if a step left it behind."""

    request: Request
    jump: bool
    since: float
    job: Job | None = None


class Sitting:
    """The requests of one scheduler that sit out."""

    def __init__(self, cache: PageCache, running: Running, waiting: Waiting) -> None:
        self._cache = cache
        self._running = running
        self._waiting = waiting
        self._threads = FairThreads("slow masks", AT_ONCE, AT_ONCE_OF_TENANT)
        self._seats: dict[int, _Seat] = {}
        """By `Request.number`."""
        self._strikes: dict[str, float] = {}
        """By tenant, when a mask was slow."""

    def __len__(self) -> int:
        return len(self._seats)

    def arrived(self, request: Request) -> None:
        """A request with a grammar has come."""
        struck = self._strikes.get(request.tenant)
        if struck is not None and time.monotonic() - struck < STRIKE_SECONDS:
            matcher = request.grammar_matcher
            matcher.slow = not matcher.compiled.ordinary

    def sit(self, request: Request, step: int, jump: bool) -> None:
        """Let a request sit out that runs or waits. What steps up to `step` sample for it is discarded. `jump`: whether
        text may be forced after its last token."""
        if request.row < 0:
            self._waiting.remove(request)
            request.discard_in_flight(step)
            self._waiting.park(request)
        elif request.computed >= len(request.tokens) and self._cache.has_states:
            # Its state is the one after its last token, or after one that does not count: it cannot be taken back.
            self._running.remove(request)
            self._cache.requests.discard(request, request.leased)
            request.discard_in_flight(step)
            self._waiting.park(request)
        else:
            request.discard_in_flight(step)
            request.recompute_last()
            self._running.sit(request)
        self.begin(request, jump)

    def begin(self, request: Request, jump: bool) -> None:
        """Make the mask of a request that sits already, or is parked."""
        self._strike(request)
        self._seats[request.number] = seat = _Seat(request, jump, time.monotonic())
        if not request.grammar_matcher.busy:
            self._submit(seat)

    def _submit(self, seat: _Seat) -> None:
        request, matcher = seat.request, seat.request.grammar_matcher
        jump = seat.jump and matcher.jumped != len(request.tokens)
        matcher.busy = True
        seat.job = self._threads.submit(request.tenant, partial(matcher.run, partial(matcher.compute, request, jump)))

    def _strike(self, request: Request) -> None:
        if request.grammar_matcher.delays:
            while len(self._strikes) >= MAX_STRIKES:
                del self._strikes[next(iter(self._strikes))]
            self._strikes.pop(request.tenant, None)
            self._strikes[request.tenant] = time.monotonic()

    # ------------------------------------------------------------ they return

    def ready(self) -> list[tuple[Request, Stuck | None]]:
        """The requests whose mask is there, or that cannot go on, with the reason. The former run or wait again; the
        latter have to be ended. Tokens that were found to be forced are still to be appended: see `Matcher.forced`."""
        ready = []
        for number, seat in list(self._seats.items()):
            request = seat.request
            problem = None if request.finished else self._problem(seat)
            if request.finished or problem or self._is_masked(seat):
                del self._seats[number]
                if seat.job is not None and self._threads.cancel(seat.job):
                    request.grammar_matcher.busy = False
                if not request.finished:
                    ready.append((request, problem))
        return ready

    def back(self, request: Request) -> None:
        """Let a request that is ready, and has its forced tokens, run or wait again."""
        self._strike(request)
        if request.row < 0:
            self._waiting.remove(request)
            self._waiting.add(request)
        else:
            self._running.stand(request)

    def _is_masked(self, seat: _Seat) -> bool:
        """Whether the mask for the next token is there, or none will be needed; if nobody makes it, begin."""
        request, matcher = seat.request, seat.request.grammar_matcher
        if matcher.busy:
            return False
        after = len(request.tokens) + len(matcher.forced)
        if matcher.masked == after or after >= request.limit:
            return True
        self._submit(seat)
        return False

    def _problem(self, seat: _Seat) -> Stuck | None:
        """Why a request cannot go on; None if it can."""
        if why := _slowness(seat):
            return bad_grammar(f"{TOO_SLOW}: {why}")
        matcher = seat.request.grammar_matcher
        return None if matcher.busy else matcher.problem


def _slowness(seat: _Seat) -> str:
    """What has taken too long; "" if nothing has."""
    request, matcher, now = seat.request, seat.request.grammar_matcher, time.monotonic()
    if matcher.busy:
        began = seat.since if seat.job is None else seat.job.began
        if began is not None and now - began > MAX_MASK_SECONDS:
            return f"what may come next was not known within {MAX_MASK_SECONDS:g} s"
        if now - seat.since > MAX_SITTING_SECONDS:
            return f"other slow grammars of yours took longer than {MAX_SITTING_SECONDS:g} s"
    elif matcher.seconds > MAX_CPU_SECONDS + CPU_SECONDS_A_TOKEN * request.generated:
        return f"{request.generated} tokens took {matcher.seconds:.0f} s"
    return ""
