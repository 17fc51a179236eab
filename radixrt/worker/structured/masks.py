"""The masks of tokens that may come next in requests with a grammar, and the text that is forced in them.

What an ordinary grammar needs (`structured.ordinary`) is done in the step. What others need is watched
(`structured.watch`): if it takes long the step goes on without the request, which sits out (`structured.sit_out`) until
it is done, or fails.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from radixrt.worker.request import Request
from radixrt.worker.structured.matcher import STRAYED, Matcher
from radixrt.worker.structured.watch import LATE_SECONDS, Task, Watch
from radixrt.worker.stuck import LATE, Stuck, bad_grammar

DEAD_END = bad_grammar("no token of the vocabulary can come next")

_watch = Watch()
Work = tuple[Matcher, Callable[[], None]]


def matchers_of(requests: Sequence[Request]) -> list[Matcher]:
    """Raises AssertionError if a request has no grammar."""
    found = [matcher for request in requests if (matcher := request.matcher)]
    assert len(found) == len(requests)
    return found


def watched(works: Sequence[Work]) -> list[bool]:
    """Do pieces of work on matchers that are not busy, in order. Returns which are done: the others were not begun, or
    their matcher is busy with them from now on, as they take long."""
    tasks = [Task(matcher.tenant, functools.partial(matcher.run, work)) for matcher, work in works]
    for matcher, _ in works:
        matcher.busy = True
    _watch.run(tasks)
    left = {matcher for (matcher, _), task in zip(works, tasks, strict=True) if task.begun and not task.done}
    for (matcher, _), task in zip(works, tasks, strict=True):
        if not task.begun and matcher not in left:
            matcher.busy = False
        if not task.done:
            matcher.slow = True
    return [task.done for task in tasks]


def jump_all(requests: Sequence[Request]) -> list[tuple[int, ...] | None]:
    """`Matcher.jump` of requests that have just gained a token. None: it is not known in time, or the request is slow,
    and the matcher may be busy with it."""
    forced: list[tuple[int, ...] | None] = [None] * len(requests)
    matchers, began = matchers_of(requests), time.thread_time()
    works: list[Work] = []
    indices: list[int] = []
    for i, (request, matcher) in enumerate(zip(requests, matchers, strict=True)):
        if matcher.busy or matcher.slow or matcher.problem:
            continue
        if matcher.compiled.ordinary:
            with matcher.excused():
                forced[i] = matcher.jump(request)
        else:
            works.append((matcher, functools.partial(matcher.compute, request, True)))
            indices.append(i)
    _note_time(matchers, began)
    if works:
        for i, (matcher, _), done in zip(indices, works, watched(works), strict=True):
            if done:
                forced[i], matcher.forced = matcher.forced, ()
    return forced


def _note_time(matchers: Sequence[Matcher], began: float) -> None:
    """If what a step has done itself since `began`, by time.thread_time(), took long, none of the grammars counts as
    ordinary any more."""
    if time.thread_time() - began > LATE_SECONDS:
        for matcher in matchers:
            matcher.compiled.ordinary = False


def draft_all(drafts: Sequence[tuple[Request, Sequence[int]]]) -> list[list[int]]:
    """`Matcher.drafted` of requests with their drafted ids; empty where it is not known in time."""
    drafted: list[list[int]] = [[] for _ in drafts]
    matchers = matchers_of([request for request, _ in drafts])

    def draft(i: int, matcher: Matcher, request: Request, ids: Sequence[int]) -> None:
        drafted[i] = matcher.drafted(request, ids)

    works: list[Work] = []
    for i, (matcher, (request, ids)) in enumerate(zip(matchers, drafts, strict=True)):
        work = functools.partial(draft, i, matcher, request, ids)
        if matcher.busy or matcher.problem:
            continue
        if matcher.compiled.ordinary:
            with matcher.excused():
                work()
        else:
            works.append((matcher, work))
    if works and not all(watched(works)):
        return [[] if matcher.busy else ids for matcher, ids in zip(matchers, drafted, strict=True)]
    return drafted


def fill_masks(
    requests: Sequence[Request], out: np.ndarray, threads: int = 1, ahead: Mapping[int, Sequence[int]] | None = None
) -> dict[int, Stuck]:
    """Write into `out`, int32[len(requests), ceil(vocabulary / 32)] in C order, which tokens may come next in each of
    `requests`, all of which have a matcher: bit i % 32 of word i // 32 for id i. For rows in `ahead`, the mask is for
    the token after these drafted ids (see `Matcher.drafted`).

    Returns, by index, why a request cannot go on, or LATE if its mask is not there in time; its row allows every
    token."""
    ahead, matchers = ahead or {}, matchers_of(requests)
    problems = _fill_known(requests, matchers, out, threads, ahead)
    for i, matcher in enumerate(matchers):
        if i in problems:
            out[i] = -1
        elif matcher.bans and (banned := matcher.banned(requests[i], len(ahead.get(i, ())))):
            _ban(out[i], banned)
    # The largest word of an empty row is 0. So it is for a row with only sign bits set, hence the second check.
    for i in np.flatnonzero(out.max(1, initial=0) == 0).tolist():
        if not out[i].any():
            problems[i] = DEAD_END
            out[i] = -1
    return problems


def _fill_known(
    requests: Sequence[Request], matchers: Sequence[Matcher], out: np.ndarray, threads: int,
    ahead: Mapping[int, Sequence[int]],
) -> dict[int, Stuck]:  # fmt: skip
    """As `fill_masks`, without bans, and without a look at the masks."""
    problems: dict[int, Stuck] = {}
    known: list[int] = []
    others: list[int] = []
    began = time.thread_time()
    for i, matcher in enumerate(matchers):
        if not matcher.compiled.ordinary:
            others.append(i)
        elif matcher.problem:
            problems[i] = matcher.problem
        elif matcher.taken < len(requests[i].tokens) and not matcher.follow(requests[i]):
            problems[i] = STRAYED
        elif i in ahead:
            out[i] = matcher.ahead(ahead[i])
        else:
            known.append(i)
    if known:
        _batch(threads).batch_fill_next_token_bitmask([matchers[i].matcher for i in known], out, known)
    _note_time(matchers, began)
    if others:
        _fill_watched(requests, matchers, others, out, ahead, problems)
    return problems


def _fill_watched(
    requests: Sequence[Request], matchers: Sequence[Matcher], indices: list[int], out: np.ndarray,
    ahead: Mapping[int, Sequence[int]], problems: dict[int, Stuck],
) -> None:  # fmt: skip
    """`_fill_known` for requests, by index, whose grammars are not ordinary."""
    rows: dict[int, np.ndarray] = {}
    todo: list[tuple[int, Matcher, Callable[[], None]]] = []

    def look(i: int, matcher: Matcher) -> None:
        rows[i] = matcher.ahead(ahead[i])

    for i in indices:
        request, matcher = requests[i], matchers[i]
        if matcher.busy:
            problems[i] = LATE
        elif i in ahead:
            todo.append((i, matcher, functools.partial(look, i, matcher)))
        elif matcher.masked != len(request.tokens) and not matcher.problem:
            todo.append((i, matcher, functools.partial(matcher.compute, request, False)))
    if todo:
        done = watched([(matcher, work) for _, matcher, work in todo])
        problems.update({i: LATE for (i, _, _), fine in zip(todo, done, strict=True) if not fine})
    for i in indices:
        matcher = matchers[i]
        if i in problems:
            continue
        if matcher.busy:
            problems[i] = LATE
        elif matcher.problem:
            problems[i] = matcher.problem
        elif i in ahead:
            out[i] = rows[i]
        else:
            out[i] = matcher.row


@functools.cache
def _batch(threads: int) -> Any:
    import xgrammar

    return xgrammar.BatchGrammarMatcher(threads)


def _ban(row: np.ndarray, ids: Iterable[int]) -> None:
    """Clear the bits of `ids` in a row, unless that would leave none."""
    left = row.view(np.uint32).copy()
    for i in ids:
        if i >> 5 < len(left):
            left[i >> 5] &= ~np.uint32(1 << (i & 31))
    if left.any():
        row.view(np.uint32)[:] = left
