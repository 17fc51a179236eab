"""`race`: the first of several branches with an acceptable result wins; the others are stopped."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from radixrt.lang.branch import Branch, check_branches
from radixrt.lang.errors import NoWinner, Site
from radixrt.lang.threads import outcome_of

Work = str | Callable[[Branch], Awaitable[Any]]
Until = Callable[[Any], bool | Awaitable[bool]]


def race(branches: Sequence[Branch], work: Work, *, until: Until | None = None) -> Awaitable[tuple[Branch, Any]]:
    """Returns (branch, result) of the first whose result satisfies `until` (sync or async; without it: the first
    result).

        best, text = await race(s.fork(8), attempt, until=is_right)

    `work` is an async function that is called with each branch concurrently, or the name of a gen or select that all of
    them have, whose text is then the result. All other branches are cancelled, here and at the server, before this
    returns. A branch whose work fails cannot win. Raises NoWinner if none is left; branches that have not failed may
    then still be used. Raises ValueError without branches."""
    return run_race(check_branches("race", branches), work, until, Site.of(sys._getframe(1)))


async def run_race(branches: list[Branch], work: Work, until: Until | None, site: Site) -> tuple[Branch, Any]:
    """See `race`."""
    if not branches:
        raise ValueError("a race needs at least one branch")
    runs = {asyncio.ensure_future(outcome_of(_run(branch, work))): branch for branch in branches}
    results: dict[str, Any] = {}
    problems: dict[str, BaseException] = {}
    losers = branches
    try:
        while runs:
            done, _ = await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
            for run in [run for run in runs if run in done]:  # in the branches' order
                branch = runs.pop(run)
                result, problem = (None, RuntimeError("cancelled")) if run.cancelled() else run.result()
                if problem is not None:
                    if not isinstance(problem, Exception):  # it wants to exit
                        raise problem
                    problems[branch.path] = problem
                    await branch.cancel()
                elif await _will_do(until, result):
                    losers = [other for other in branches if other is not branch]
                    return branch, result
                else:
                    results[branch.path] = result
        losers = []
        raise NoWinner(site, results, problems)
    finally:
        await _stop(list(runs), losers)


async def _run(branch: Branch, work: Work) -> Any:
    return await (branch[work] if isinstance(work, str) else work(branch))


async def _will_do(until: Until | None, result: Any) -> bool:
    if until is None:
        return True
    answer = until(result)
    return bool(await answer if inspect.isawaitable(answer) else answer)


async def _stop(runs: Sequence[asyncio.Future[Any]], losers: Sequence[Branch]) -> None:
    for run in runs:
        run.cancel()
    await asyncio.gather(*(branch.cancel() for branch in losers))
    if runs:
        await asyncio.wait(runs)
