"""Which worker gets a request: the one expected to give its first token soonest, but for what others lose by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

DEFAULT_PREFILL_RATE = 5_000.0
"""Tokens a second, for workers of which none has measured its rate yet."""
NEAR_TIE = 0.1
"""Estimates this close (as a share of the best, plus `TIE_SECONDS`) are noise of the measured rates."""
TIE_SECONDS = 0.001
SAME = 1.3
"""Measured rates and steps within this factor of their mean are taken for equal, and those that nobody measured: a
moment's noise must not have two workers compute one prefix."""
AGAIN = 2.0
"""What a token counts for that a busy worker would compute and another one holds: what is there already waits for it,
and it takes room twice."""
WAITS = 0.25
"""What it counts for beyond that, for each request there, where these fill the cache: what is thrown out for it is soon
computed again, too, and they wait for both (bench/placement.py)."""
FILLED = 0.5, 1.0
"""Of the cache: what the requests there want, where WAITS begins to count and where it counts whole."""
PARTS = 8
"""Of the longest hit, for each of which is counted who shares it."""
TYPICAL_OUTPUT = 128
"""Tokens a running request is expected to generate before its place is free."""


class Candidate(NamedTuple):
    """A worker as placement sees it for one request. Tokens and pages are counts, rates per second."""

    worker: int
    hit_tokens: int
    """Leading tokens of this request that it holds or is computing."""
    queued_tokens: int
    """Uncomputed tokens of requests that are there already."""
    requests: int
    """Running and waiting there."""
    max_running: int
    free_tokens: int
    """Token slots that are free or hold evictable pages."""
    prefill_rate: float = 0.0
    step_seconds: float = 0.0
    empty_tokens: int = 0
    """Token slots that hold nothing."""
    wanted_tokens: int = 0
    """Those that requests there hold, once each, and those of requests whose first token is still to come."""
    total_tokens: int = 0
    """Token slots; 0: nobody knows."""


def time_to_first_token(tokens: int, worker: Candidate, default_rate: float = DEFAULT_PREFILL_RATE) -> float:
    """Estimated seconds until `worker` gives the first token of a request of `tokens`.

        uncached  = tokens - hit_tokens
        prefill   = (queued_tokens + uncached) / prefill_rate         everything before it, and itself
        step      = step_seconds                                      the step under way must end
        memory    = max(0, uncached - free_tokens) * step_seconds / requests
        place     = max(0, requests + 1 - max_running) * TYPICAL_OUTPUT * step_seconds / max_running
        estimate  = prefill + step + memory + place                   [s]

    Memory: in a steady state running requests free slots as fast as they fill them, `requests` a step.
    Place: of `max_running` requests, one ends every TYPICAL_OUTPUT / max_running steps.
    What counts is the absolute uncached work: a prefix that everybody shares and that is short against the
    queue pulls nobody to its worker.
    """
    return _estimate(tokens, worker, worker.prefill_rate or default_rate, worker.step_seconds)


def _estimate(tokens: int, worker: Candidate, rate: float, step: float) -> float:
    """`time_to_first_token` at a rate and a step that need not be the worker's own."""
    uncached = tokens - worker.hit_tokens
    estimate = (worker.queued_tokens + uncached) / rate + step
    if uncached > worker.free_tokens:
        estimate += (uncached - worker.free_tokens) * step / max(1, worker.requests)
    crowd = worker.requests + 1 - worker.max_running
    if crowd > 0:
        estimate += crowd * TYPICAL_OUTPUT * step / worker.max_running
    return estimate


def times_again(worker: Candidate) -> float:
    """What a token counts for that another worker holds: itself for an idle one, AGAIN for a busy one, and up to WAITS
    more for each request there, as they fill its cache."""
    if not worker.requests:
        return 1.0
    least, most = FILLED
    filled = worker.wanted_tokens / worker.total_tokens if worker.total_tokens else 0.0
    return AGAIN + WAITS * worker.requests * min(1.0, max(0.0, (filled - least) / (most - least)))


def shared_out(hit: int, best: int, sharers: Sequence[int]) -> float:
    """Tokens that hit to `best` of a request are in equal shares, for the request and those that begin likewise.
    `sharers[i]`: so many others decode behind the first (i + 1) / PARTS of `best` tokens; none are given where nobody
    was asked.

    What everybody shares is soon everywhere so, and what nobody else needs is not computed twice for a moment's queue.
    """
    if not sharers:
        return best - hit
    ends = [best * (i + 1) // PARTS for i in range(PARTS)]
    parts = zip([0, *ends], ends, sharers, strict=False)
    return sum(max(0, end - max(begin, hit)) / (1 + others) for begin, end, others in parts)


def place(tokens: int, workers: Sequence[Candidate], sharers: Sequence[int] = ()) -> tuple[Candidate, float]:
    """The worker for a request of `tokens`, and its estimate in seconds. ValueError without workers.

    The smallest estimate wins. In it tokens that another worker holds are `shared_out`, and count `times_again`: what a
    worker computes for them keeps others waiting, and serves others later. Among near ties: most hits (in sixteenths of
    the request, so that a few tokens that everything begins with decide nothing), then fewest requests, then most empty
    slots, then the lowest number, so that idle workers fill their caches evenly.
    """
    if not workers:
        raise ValueError("no workers")
    rates = _steady([w.prefill_rate for w in workers], DEFAULT_PREFILL_RATE)
    steps = _steady([w.step_seconds for w in workers], 0.0)
    estimates = [
        _estimate(tokens, worker, rate, step) for worker, rate, step in zip(workers, rates, steps, strict=True)
    ]
    if len(workers) == 1:
        return workers[0], estimates[0]
    best = max(worker.hit_tokens for worker in workers)
    for i, (worker, rate) in enumerate(zip(workers, rates, strict=True)):
        if worker.hit_tokens < best:
            missing = best - worker.hit_tokens
            estimates[i] += (times_again(worker) * shared_out(worker.hit_tokens, best, sharers) - missing) / rate
    bar = min(estimates) * (1 + NEAR_TIE) + TIE_SECONDS
    near = [(w, estimate) for w, estimate in zip(workers, estimates, strict=True) if estimate <= bar]

    def rank(pair: tuple[Candidate, float]) -> tuple[int, ...]:
        worker = pair[0]
        return -(16 * worker.hit_tokens // max(tokens, 1)), worker.requests, -worker.empty_tokens, worker.worker

    return min(near, key=rank)


def _steady(values: list[float], unknown: float) -> list[float]:
    """Without noise; `unknown` if none is measured (0: not)."""
    measured = [value for value in values if value > 0]
    if len(values) == len(measured) == 1:
        return values
    mean = sum(measured) / len(measured) if measured else unknown
    return [value if value > 0 and not mean / SAME <= value <= mean * SAME else mean for value in values]
