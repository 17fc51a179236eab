"""Budgets of generated tokens and seconds, for everything appended to a branch and its forks in a `with` block."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator

import msgspec

from radixrt.lang.errors import Site, Spent
from radixrt.messages import Sampling


class Budget:
    """What may be spent, and what has been spent. See `Branch.budget`.

    Tokens are counted as they arrive; a select costs none. When none are left, or the time is over, whatever still runs
    under the budget is stopped, here and at the server. With several concurrent gens, the tokens of one more step may
    have arrived by then.
    """

    def __init__(self, tokens: int | None, seconds: float | None, above: Budget | None, site: Site) -> None:
        """Raises ValueError for neither, or for negative values."""
        if tokens is None and seconds is None:
            raise ValueError("a budget is of tokens, of seconds, or of both")
        if (tokens or 0) < 0 or (seconds or 0) < 0:
            raise ValueError("a budget cannot be negative")
        self.tokens = tokens
        self.seconds = seconds
        self.used = 0
        """Tokens generated under it so far."""
        self._above = above
        self._site = site
        self._deadline: float | None = None
        self._running: set[asyncio.Timeout] = set()

    def begin(self) -> None:
        """Start the clock."""
        if self.seconds is not None:
            self._deadline = time.monotonic() + self.seconds

    @property
    def left(self) -> int | None:
        """Tokens that may still be generated, also by the outer budgets; None if none of them limits tokens."""
        left = [max(0, budget.tokens - budget.used) for budget in self._all() if budget.tokens is not None]
        return min(left, default=None)

    @property
    def seconds_left(self) -> float | None:
        """As `left`, in seconds."""
        now = time.monotonic()
        return min((max(0.0, b._deadline - now) for b in self._all() if b._deadline is not None), default=None)

    def _all(self) -> Iterator[Budget]:
        """This budget and all outer ones."""
        budget: Budget | None = self
        while budget is not None:
            yield budget
            budget = budget._above

    def charge(self, tokens: int) -> None:
        """Count generated tokens; stop what runs under a budget that has none left."""
        now = asyncio.get_running_loop().time()
        for budget in self._all():
            budget.used += tokens
            if tokens and budget.tokens is not None and budget.used >= budget.tokens:
                for limit in budget._running:
                    if not limit.expired():  # an expired one cannot be rescheduled
                        limit.reschedule(now)

    def clamp(self, sampling: Sampling) -> Sampling:
        """`sampling` with max_tokens of at most what is left. Raises Spent if that is nothing."""
        left = self.left
        if left is None or (sampling.max_tokens is not None and sampling.max_tokens <= left):
            return sampling
        if left == 0:
            raise self.spent()
        return msgspec.structs.replace(sampling, max_tokens=left, min_tokens=min(sampling.min_tokens, left))

    def spent(self) -> Spent:
        """The error, which names the budget that is spent, this one or an outer one."""
        now = time.monotonic()
        for budget in self._all():
            if budget.tokens is not None and budget.used >= budget.tokens:
                return Spent(f"the budget of {budget.tokens} tokens ({budget._site}) is spent")
            if budget._deadline is not None and now >= budget._deadline:
                return Spent(f"the budget of {budget.seconds:g} seconds ({budget._site}) is spent")
        return Spent("the budget is spent")

    @contextlib.asynccontextmanager
    async def _limit(self) -> AsyncIterator[None]:
        seconds = self.seconds_left
        if seconds == 0:
            raise self.spent()
        try:
            async with asyncio.timeout(seconds) as limit:
                for budget in self._all():
                    budget._running.add(limit)
                yield
        except TimeoutError:
            if not limit.expired():  # the TimeoutError is not from this limit
                raise
            raise self.spent() from None
        finally:
            for budget in self._all():
                budget._running.discard(limit)


def within(budget: Budget | None) -> contextlib.AbstractAsyncContextManager[None]:
    """A context in which work is stopped with Spent when the budget is spent."""
    return contextlib.nullcontext() if budget is None else budget._limit()
