"""Checks answers, and summarizes them as rows of the table. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.serve.client import Run
from bench.serve.endpoint import Answer
from bench.serve.loads import Load


class WrongAnswer(AssertionError):
    """The server's answers are wrong, so its times would be meaningless."""


def check_counts(load: Load, answers: Sequence[Answer]) -> None:
    """Raise WrongAnswer unless each answer has the requested number of tokens, and the prompt's length is as sent."""
    for number, (ask, answer) in enumerate(zip(load.asks, answers, strict=True)):
        for what, seen, wanted in (
            ("prompt", answer.prompt_tokens, load.prompt_tokens(ask)),
            ("generated", answer.completion_tokens, ask.max_tokens),
        ):
            if seen != wanted:
                raise WrongAnswer(f"{load.name}, request {number}: {seen} {what} tokens instead of {wanted}")
        if (answer.cached_tokens or 0) > answer.prompt_tokens:
            raise WrongAnswer(f"{load.name}, request {number}: more cached tokens than the prompt has")


def check_twice(answers: Sequence[Answer], *, same_text: bool = True) -> None:
    """Raise WrongAnswer unless the second of two equal requests, at temperature 0, has the same text, and cached
    tokens."""
    first, second = answers
    if second.cached_tokens == 0:
        raise WrongAnswer("the same prompt again: no token of it was cached")
    if same_text and first.digest != second.digest:
        raise WrongAnswer("the same prompt again: another text at temperature 0 (--lenient goes on nevertheless)")


def percentile(values: Sequence[float], percent: float) -> float | None:
    """A percentile, interpolated linearly; None without values."""
    return float(np.percentile(values, percent)) if len(values) else None


def ttft_ms(answer: Answer) -> float:
    """Milliseconds from sending to the first chunk with a choice."""
    return (answer.first - answer.sent) * 1e3


def tpot_ms(answer: Answer) -> float:
    """Milliseconds per token after the first: (last - first) / (tokens - 1)."""
    return (answer.last - answer.first) / (answer.completion_tokens - 1) * 1e3


def cached_share(answers: Sequence[Answer]) -> float | None:
    """Cached tokens over prompt tokens, of all requests; None if the server does not report them."""
    cached = [answer.cached_tokens for answer in answers]
    return None if None in cached else sum(cached) / sum(answer.prompt_tokens for answer in answers)


def row(load: Load, run: Run) -> dict[str, Any]:
    """The row of a load. `cached`, `could` and `gpu_idle` are from 0 to 1; `could` is the cached share with a cache of
    unlimited size. `chunks` is the number of chunks per token: if it is much less than 1, the server collects tokens
    before it sends them, and its first token was generated before `ttft`."""
    answers = run.answers
    generated = sum(answer.completion_tokens for answer in answers)
    first = [ttft_ms(answer) for answer in answers]
    between = [tpot_ms(answer) for answer in answers if answer.completion_tokens > 1]
    return {
        "load": load.name,
        "out_tok_s": generated / run.seconds,
        "req_s": len(answers) / run.seconds,
        "ttft_p50_ms": percentile(first, 50),
        "ttft_p99_ms": percentile(first, 99),
        "tpot_p50_ms": percentile(between, 50),
        "tpot_p99_ms": percentile(between, 99),
        "chunks": sum(answer.chunks for answer in answers) / generated,
        "cached": cached_share(answers),
        "could": load.shareable(),
        "wall_s": run.seconds,
        "gpu_idle": run.gpu_idle,
        "client_cpu": run.cpu / run.seconds,
    }


def rows(load: Load, run: Run) -> list[dict[str, Any]]:
    """The row of a load, and one for each tenant, if any, with only its requests, over the same time."""
    found = [row(load, run)]
    for tenant in dict.fromkeys(ask.tenant for ask in load.asks if ask.tenant):
        pairs = [pair for pair in zip(load.asks, run.answers, strict=True) if pair[0].tenant == tenant]
        asks, answers = (list(column) for column in zip(*pairs, strict=True))
        part = Load(f"{load.name}, {tenant}", load.segments, asks)
        found.append(row(part, Run(run.seconds, run.cpu, answers=answers)))
    return found


def rival_rows(content: Any) -> list[dict[str, Any]]:
    """Rows of another server, from a list of rows, or {"server": name, "rows": [...]} as this benchmark writes it. A
    row has a `load`, a `server` (unless the file has), and figures with the names in `row`. Raises ValueError if
    not."""
    common = {"server": content["server"]} if isinstance(content, dict) and "server" in content else {}
    rows = [common | one for one in (content["rows"] if isinstance(content, dict) else content)]
    for one in rows:
        if not {"load", "server"} <= one.keys():
            raise ValueError(f"a rival's row needs a load and a server: {one}")
    return rows


def beside(rows: Sequence[dict[str, Any]], rivals: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the table: for each load ours, then rivals'. Columns without any value are left out; a missing value
    is "-"."""
    loads = dict.fromkeys(one["load"] for one in rows)
    ordered = [one for load in loads for one in (*rows, *rivals) if one["load"] == load]
    keys = ["load", "server", *(key for key in rows[0] if key not in ("load", "server"))]
    known = [key for key in keys if any(one.get(key) is not None for one in ordered)]
    return [{key: "-" if one.get(key) is None else one[key] for key in known} for one in ordered]
