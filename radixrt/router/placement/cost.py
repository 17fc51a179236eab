"""Placement: a request goes to the worker with the shortest estimated time to first token, corrected for what that
costs other requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

DEFAULT_PREFILL_RATE = 5_000.0
"""Tokens per second, if no worker has measured its rate yet."""
NEAR_TIE = 0.1
"""Estimates this close (as a share of the best, plus `TIE_SECONDS`) count as equal: the difference is measurement
noise."""
TIE_SECONDS = 0.001
SAME = 1.3
"""Measured rates and step times within this factor of their mean, and unknown ones, are replaced by the mean, so that
noise does not make two workers compute the same prefix."""
RECOMPUTE_WEIGHT = 2.0
"""Weight of a token that a busy worker would compute although another worker holds it: the requests there wait for it,
and it takes memory twice."""
CROWDING_WEIGHT = 0.25
"""Additional weight for each request there, as these fill the cache: what is evicted for the token is soon computed
again as well, and they wait for both (bench/placement.py)."""
FILL_RANGE = 0.5, 1.0
"""Shares of the cache that the requests there need, at which CROWDING_WEIGHT begins to count and at which it counts in
full."""
PARTS = 8
"""Parts of the largest hit, for each of which sharers are counted."""
FAILURE_SECONDS = 2.0
"""Time that a request loses, on average, if its worker fails it and another one has to go on with it."""
IDLE_HALF_LIFE = 30.0
"""Seconds after which the measured rate of a worker counts half, if it is idle while others are busy: it may be that
of a time when it was slow, and while it is idle it measures none."""
TYPICAL_OUTPUT = 128
"""Tokens that a running request is expected to generate before its place is free."""


class Candidate(NamedTuple):
    """A worker as placement sees it for one request. Tokens and pages are counts, rates per second."""

    worker: int
    hit_tokens: int
    """Leading tokens of this request that it holds or is computing."""
    queued_tokens: int
    """Uncomputed tokens of the requests there."""
    requests: int
    """Requests there, running and waiting."""
    max_running: int
    free_tokens: int
    """Token slots that are free or hold evictable pages."""
    prefill_rate: float = 0.0
    step_seconds: float = 0.0
    empty_tokens: int = 0
    """Token slots that hold nothing."""
    wanted_tokens: int = 0
    """Token slots that the requests there hold (shared ones once), and tokens of requests whose first token has not
    come."""
    total_tokens: int = 0
    """Token slots in all; 0: unknown."""
    failed_share: float = 0.0
    """Share of requests that it is expected to fail, in [0, 1] (`incidents.Record`)."""
    idle_seconds: float = 0.0
    """Time since it was sent a request; 0 while it has any."""
    rate_known: bool = True
    """Whether the rate is that of several prompts: the first ones are slow where code is loaded or compiled."""


def time_to_first_token(tokens: int, worker: Candidate) -> float:
    """Estimated seconds until `worker` gives the first token of a request of `tokens`.

        uncached  = tokens - hit_tokens
        prefill   = (queued_tokens + uncached) / prefill_rate         everything before it, and itself
        step      = step_seconds if requests > 0                      the current step has to end
        memory    = max(0, uncached - free_tokens) * step_seconds / requests
        place     = max(0, requests + 1 - max_running) * TYPICAL_OUTPUT * step_seconds / max_running
        failures  = failed_share * FAILURE_SECONDS                    what fails there begins anew elsewhere
        estimate  = prefill + step + memory + place + failures        [s]

    Memory: in a steady state running requests free slots as fast as they fill them, `requests` per step.
    Place: of `max_running` requests, one ends every TYPICAL_OUTPUT / max_running steps.
    Uncached work counts in absolute terms, so a prefix that all requests share and that is short compared with the
    queue does not attract them to its worker.
    """
    return _estimate(tokens, worker, worker.prefill_rate or DEFAULT_PREFILL_RATE, worker.step_seconds)


def _estimate(tokens: int, worker: Candidate, rate: float, step: float) -> float:
    """`time_to_first_token` with a given rate and step time instead of the worker's own."""
    uncached = tokens - worker.hit_tokens
    estimate = (worker.queued_tokens + uncached) / rate + (step if worker.requests else 0.0)
    if worker.failed_share:
        estimate += worker.failed_share * FAILURE_SECONDS
    if uncached > worker.free_tokens:
        estimate += (uncached - worker.free_tokens) * step / max(1, worker.requests)
    crowd = worker.requests + 1 - worker.max_running
    if crowd > 0:
        estimate += crowd * TYPICAL_OUTPUT * step / worker.max_running
    return estimate


def recompute_weight(worker: Candidate) -> float:
    """Weight of a token that `worker` would compute although another one holds it: 1 if it is idle, RECOMPUTE_WEIGHT if
    it is busy, and up to CROWDING_WEIGHT more for each request there, as these fill its cache."""
    if not worker.requests:
        return 1.0
    least, most = FILL_RANGE
    filled = worker.wanted_tokens / worker.total_tokens if worker.total_tokens else 0.0
    return RECOMPUTE_WEIGHT + CROWDING_WEIGHT * worker.requests * min(1.0, max(0.0, (filled - least) / (most - least)))


def shared_cost(hit: int, best: int, sharers: Sequence[int]) -> float:
    """Cost in tokens of computing the tokens [hit, best) of a request once more, if it is divided equally among the
    requests that share them. `sharers[i]` is the number of others that decode behind the first (i + 1) / PARTS of the
    `best` tokens; without `sharers` there are no others.

    So a prefix that all requests share soon spreads to all workers, and one that only this request needs is not
    computed twice because of a momentary queue.
    """
    if not sharers:
        return best - hit
    ends = [best * (i + 1) // PARTS for i in range(PARTS)]
    parts = zip([0, *ends], ends, sharers, strict=False)
    return sum(max(0, end - max(begin, hit)) / (1 + others) for begin, end, others in parts)


def place(tokens: int, workers: Sequence[Candidate], sharers: Sequence[int] = ()) -> tuple[Candidate, float]:
    """Returns the worker for a request of `tokens` tokens, and its estimate in seconds. Raises ValueError without
    workers.

    The smallest estimate wins. In it, uncached tokens that another worker holds count as their `shared_cost` times
    `recompute_weight`, because computing them keeps others waiting, and serves others later. Among near ties: the
    largest hit (in sixteenths of the request, so that a few tokens that all requests begin with do not decide), then
    the fewest requests, then the most empty slots, so that idle workers fill their caches evenly, then the lowest
    number.
    """
    if not workers:
        raise ValueError("no workers")
    rates = _steady([w.prefill_rate for w in workers], DEFAULT_PREFILL_RATE, workers, [w.rate_known for w in workers])
    steps = _steady([w.step_seconds for w in workers], 0.0, workers, [True] * len(workers))
    estimates = [
        _estimate(tokens, worker, rate, step) for worker, rate, step in zip(workers, rates, steps, strict=True)
    ]
    if len(workers) == 1:
        return workers[0], estimates[0]
    best = max(worker.hit_tokens for worker in workers)
    for i, (worker, rate) in enumerate(zip(workers, rates, strict=True)):
        if worker.hit_tokens < best:
            missing = best - worker.hit_tokens
            estimates[i] += (recompute_weight(worker) * shared_cost(worker.hit_tokens, best, sharers) - missing) / rate
    limit = min(estimates) * (1 + NEAR_TIE) + TIE_SECONDS
    near = [(w, estimate) for w, estimate in zip(workers, estimates, strict=True) if estimate <= limit]

    def rank(pair: tuple[Candidate, float]) -> tuple[int, ...]:
        worker = pair[0]
        return -(16 * worker.hit_tokens // max(tokens, 1)), worker.requests, -worker.empty_tokens, worker.worker

    return min(near, key=rank)


def _steady(values: list[float], unknown: float, workers: Sequence[Candidate], known: Sequence[bool]) -> list[float]:
    """Measured values without noise (see SAME); 0 means not measured, and if none is, all are `unknown`. `known`: those
    that count at all, unless none does.

    value = trust * measured + (1 - trust) * mean
    trust = 2 ** -(idle_seconds / IDLE_HALF_LIFE) if others are busy and it is known; 0 if it is not, and otherwise 1
    """
    measured = [value for value in values if value > 0]
    if len(values) == len(measured) == 1:
        return values
    mean = sum(measured) / len(measured) if measured else unknown
    low, high = mean / SAME, mean * SAME
    if all([low <= value <= high or value <= 0 for value in values]):
        return [mean] * len(values)
    if counting := [value for value, counts in zip(values, known, strict=True) if value > 0 and counts]:
        mean = sum(counting) / len(counting)
    busy = any(worker.requests for worker in workers)
    steady = []
    for value, counts, worker in zip(values, known, workers, strict=True):
        trust = 0.5 ** (worker.idle_seconds / IDLE_HALF_LIFE) if busy else 1.0
        noise = value <= 0 or not counts or mean / SAME <= value <= mean * SAME
        steady.append(mean if noise else trust * value + (1 - trust) * mean)
    return steady
