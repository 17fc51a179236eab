"""Sums a run up as a row of the table, and searches for the most agents that a server holds. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from bench.agents.client import Request, Run
from bench.serve.endpoint import Answer
from bench.serve.rows import percentile, tpot_ms, ttft_ms

CONTINUATION = 2_000
"""The most new tokens of a continuation whose time to first token is shown apart."""
MOST_ERRORS = 0.05
"""The share of requests that may fail before a run is not valid."""


def failure(request: Request) -> str:
    """Why a request counts as failed, its kind before a colon; empty if it does not."""
    answer = request.answer
    if request.error or answer is None:
        return request.error
    if answer.completion_tokens != request.max_tokens:
        return f"answer of another length: {answer.completion_tokens} tokens instead of {request.max_tokens}"
    if request.in_tokens and answer.prompt_tokens != request.size:
        return f"prompt of another length: {answer.prompt_tokens} tokens instead of {request.size}"
    return ""


def known_tokens(request: Request) -> float:
    """What a cache of unlimited size would have had of an answered request's prompt."""
    assert request.answer is not None
    return request.known / request.size * request.answer.prompt_tokens


def is_continuation(request: Request) -> bool:
    assert request.answer is not None
    return request.continues and request.answer.prompt_tokens - known_tokens(request) <= CONTINUATION


def generated_within(answer: Answer, began: float, ended: float) -> float:
    """The tokens of an answer that came between two times, if they came evenly from the first to the last."""
    if answer.last <= answer.first:
        return answer.completion_tokens if began <= answer.first <= ended else 0.0
    seconds = min(answer.last, ended) - max(answer.first, began)
    return max(0.0, seconds) / (answer.last - answer.first) * answer.completion_tokens


def row(agents: int, run: Run) -> dict[str, Any]:
    """The row of a run. Rates are of the window; latencies of all requests that were sent in it and answered.
    `cached`, `infinite`, `of_infinite` and `gpu_idle` are from 0 to 1, None if the server does not report it: the share
    of prompt tokens that were cached, that with a cache of unlimited size, and the one by the other."""
    ended = run.began + run.seconds
    good = [request for request in run.requests if request.answer is not None and not failure(request)]
    answers = [request.answer for request in good if request.answer is not None]
    first = [ttft_ms(answer) / 1e3 for answer in answers]
    continued = [ttft_ms(one.answer) / 1e3 for one in good if one.answer is not None and is_continuation(one)]
    each = [tpot_ms(answer) for answer in answers if answer.completion_tokens > 1]
    slow = percentile(each, 90)
    cached, infinite = cached_shares(good)
    return {
        "agents": agents,
        "req_s": sum(answer.last <= ended for answer in answers) / run.seconds,
        "out_tok_s": sum(generated_within(answer, run.began, ended) for answer in answers) / run.seconds,
        "ttft_p50_s": percentile(first, 50),
        "ttft_p90_s": percentile(first, 90),
        "ttft_p99_s": percentile(first, 99),
        "cont_p50_s": percentile(continued, 50),
        "cont_p90_s": percentile(continued, 90),
        "cont_p99_s": percentile(continued, 99),
        "tpot_p50_ms": percentile(each, 50),
        "tpot_p90_ms": slow,
        "p90_tok_s": 1e3 / slow if slow else None,
        "cached": cached,
        "infinite": infinite,
        "of_infinite": cached / infinite if cached is not None and infinite else None,
        "errors": sum(bool(failure(request)) for request in run.requests),
        "unfinished": sum(request.answer is None and not request.error for request in run.requests),
        "gpu_idle": run.gpu_idle,
    }


def cached_shares(good: Sequence[Request]) -> tuple[float | None, float | None]:
    """Returns (cached tokens, those of a cache of unlimited size) over prompt tokens."""
    answers = [request.answer for request in good if request.answer is not None]
    prompts = sum(answer.prompt_tokens for answer in answers)
    if not prompts:
        return None, None
    cached = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    known = sum(known_tokens(request) for request in good) / prompts
    return sum(cached) / prompts if len(cached) == len(answers) else None, known


def details(run: Run) -> dict[str, Any]:
    """What the table does not show."""
    good = [request for request in run.requests if request.answer is not None and not failure(request)]
    failures = [reason for request in run.requests if (reason := failure(request))]
    kinds = [reason.split(":")[0] for reason in failures]
    return {
        "requests": len(run.requests),
        "continuations": sum(map(is_continuation, good)),
        "sessions": run.sessions,
        "errors_by_kind": dict(Counter(kinds)),
        "first_errors": {kind: failures[kinds.index(kind)] for kind in dict.fromkeys(kinds)},
        "valid": bool(good) and len(failures) <= MOST_ERRORS * len(run.requests),
        "warm_s": run.warm_seconds,
        "window_s": run.seconds,
        "client_cpu": run.cpu / run.seconds,
    }


# ---------------------------------------------------------------- the most agents


def holds(row: dict[str, Any], speed: float, first_seconds: float) -> bool:
    """Whether the run is valid, nine requests in ten are generated with at least `speed` tokens per second, and nine in
    ten get their first token within `first_seconds`."""
    if not row["valid"] or row["tpot_p90_ms"] is None:
        return False
    return row["tpot_p90_ms"] <= 1e3 / speed and row["ttft_p90_s"] <= first_seconds


def most_agents(holds: Callable[[int], bool], first: int, most: int) -> int:
    """The most agents, up to `most`, for which it holds, if it holds for fewer whenever it holds for more; 0 if for
    none. It is doubled or halved from `first`, then bisected."""
    good, bad, number = 0, most + 1, min(first, most)
    while good + 1 < bad:
        if holds(number):
            good = number
        else:
            bad = number
        if bad > most:
            number = min(2 * good, most)
        elif good == 0:
            number = bad // 2
        else:
            number = (good + bad) // 2
    return good
