"""When contexts return, as learned per tenant and by what they wait for, and what it is worth to keep them.

    ended, by a call of `run_tests`  --seconds-->  continued by the next turn, or not within LONGEST_SECONDS

The value of a cached token is that of a hit, times the chance that it comes, by the seconds until then. For how long
it pays to wait depends on the age: a tool that has not answered after a minute mostly takes an hour. So the rate of an
age is the most that any waiting time gives:

    rate(age) = max over T of  P(it returns before age + T) / E[seconds until it returns, at most T]

Leaves of the radix tree are evicted in the order of their rates (see `radixrt.tree`, `set_returns`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import count

import numpy as np

EDGES = [0.0, *(round(1.25**n, 2) for n in range(37))]
"""Seconds: where the steps of ages begin."""
LONGEST_SECONDS = EDGES[-1]
"""What has not returned by then is taken to have ended."""
MAX_TENANTS = 64
"""Tenants whose times are known; those of the one that was longest without any are forgotten first."""
MAX_KINDS = 512
"""Kinds of a tenant that are told apart; others count as the more general ones, or as kind 0, which is unknown."""
MAX_TABLES = 2048
"""Kinds of all tenants."""
MAX_AT_ONCE = 32
"""Kinds of which the rates are computed again at a time, in some milliseconds."""
_PRIOR = 5.0
"""Contexts that the estimate of the more general kind counts for; for the topmost, `_UNKNOWN`."""
_MEMORY = 4096.0
"""When so many contexts of a kind were seen, all counts are halved: what is long ago counts less."""
_GROWTH = 0.1
"""Rates are computed again when so much more was seen, relative to what they were computed of."""
Kind = tuple[Hashable, ...]
"""What a context waits for, from the general to the special: ("tool run_tests", pace). Each of its beginnings is a
kind, of which the estimate is the prior of the next."""

_WIDTHS = np.diff(EDGES)
_UNKNOWN = 1 - (1 + np.array(EDGES[:-1])) / (1 + np.array(EDGES[1:]))
"""Chance that a context of which nothing is known returns within each step, if not before: the longer it has not, the
smaller. So the order of such contexts is that of their last use."""


def rates_of(chances: np.ndarray) -> np.ndarray:
    """float64[len(EDGES)]: the rate of each age (see above), of the chances float64[len(EDGES) - 1] to return within
    each step, if not before. For what is older than the last edge, it is 0."""
    alive = np.concatenate([[1.0], np.cumprod(1 - chances)])
    waited = np.concatenate([[0.0], np.cumsum(_WIDTHS * (alive[:-1] + alive[1:]) / 2)])
    came = alive[:-1, None] - alive[None, 1:]
    seconds = waited[None, 1:] - waited[:-1, None]
    later = np.tri(len(chances), dtype=bool).T & (seconds > 0)
    rates = np.divide(came, seconds, out=np.zeros_like(came), where=later).max(axis=1)
    return np.append(rates, 0.0)


class _Table:
    """A life table: how many contexts were there at the beginning of each step, and how many returned within it."""

    def __init__(self, row: int, general: _Table | None) -> None:
        self.row = row
        """0 once its tenant was forgotten."""
        self._general = general
        self.there = np.zeros(len(EDGES) - 1)
        self.came = np.zeros(len(EDGES) - 1)

    def chances(self) -> np.ndarray:
        prior = self._general.chances() if self._general is not None else _UNKNOWN
        chances: np.ndarray = (self.came + _PRIOR * prior) / (self.there + _PRIOR)
        return chances

    def begin(self) -> None:
        self.there[0] += 1
        if self.there[0] > _MEMORY:
            self.there /= 2
            self.came /= 2


@dataclass(slots=True, eq=False)
class Wait:
    """A context that is waited for since a time, which counts in `tables`, and how old it is, in steps."""

    tables: list[_Table]
    since: float
    step: int = 0
    open: bool = True


class ReturnTimes:
    """The times of all tenants. One tenant's never influence what is estimated for another. What is still waited for
    counts as far as it has come: otherwise nothing would be known of those that return late or never."""

    def __init__(self) -> None:
        self._tables: OrderedDict[str, dict[Kind, _Table]] = OrderedDict()
        """By tenant, the one that waited last at the end."""
        self._free: list[int] = []
        self._rows = count(1)
        self._seen = self._seen_then = 0
        self._rates = rates_of(_UNKNOWN)[None, :]
        self._changed: dict[_Table, None] = {}
        """Those whose rates are out of date, the longest first."""
        self._waits: list[deque[Wait]] = [deque() for _ in _WIDTHS]
        """By step, in order of time; closed ones are dropped when their step is over."""

    def row(self, tenant: str, kind: Kind) -> int:
        """The row of `rates` of a kind, or the longest known beginning of it; 0 if there is none."""
        own = self._tables.get(tenant, {})
        for length in range(len(kind), 0, -1):
            if (table := own.get(kind[:length])) is not None:
                return table.row
        return 0

    def wait(self, tenant: str, kind: Kind, now: float) -> Wait:
        """A context of that kind is waited for from now on. Calls come in order of time."""
        own = self._tables.setdefault(tenant, {})
        self._tables.move_to_end(tenant)
        tables: list[_Table] = []
        for length in range(1, len(kind) + 1):
            if (table := own.get(kind[:length])) is None:
                if len(own) >= MAX_KINDS:
                    break
                row = self._free.pop() if self._free else next(self._rows)
                table = own[kind[:length]] = _Table(row, tables[-1] if tables else None)
            table.begin()
            tables.append(table)
        while len(self._tables) > 1 and (len(self._tables) > MAX_TENANTS or self._num_tables > MAX_TABLES):
            self.delete(next(iter(self._tables)))
        self._changed.update(dict.fromkeys(tables))
        wait = Wait(tables, now)
        self._waits[0].append(wait)
        self._seen += 1
        return wait

    def returned(self, wait: Wait, now: float) -> None:
        """The context has returned."""
        self.advance(now)
        if wait.open:
            wait.open = False
            for table in wait.tables:
                table.came[wait.step] += 1
            self._changed.update(dict.fromkeys(wait.tables))

    def advance(self, now: float) -> None:
        """What is waited for grows older. Amortised: a few operations for each step of each wait."""
        for step, waits in enumerate(self._waits):
            end = EDGES[step + 1]
            while waits and waits[0].since + end <= now:
                wait = waits.popleft()
                if not wait.open:
                    continue
                if step + 1 == len(self._waits):
                    wait.open = False
                    continue
                wait.step = step + 1
                for table in wait.tables:
                    table.there[step + 1] += 1
                self._changed.update(dict.fromkeys(wait.tables))
                self._waits[step + 1].append(wait)

    def delete(self, tenant: str) -> None:
        """Forget all that was seen of a tenant."""
        for table in self._tables.pop(tenant, {}).values():
            self._free.append(table.row)
            if table.row < len(self._rates):
                self._rates[table.row] = self._rates[0]
            table.row = 0

    @property
    def _num_tables(self) -> int:
        return sum(map(len, self._tables.values()))

    @property
    def has_news(self) -> bool:
        """Whether `rates` should be taken again."""
        return self._seen > self._seen_then + max(8, min(_MEMORY, _GROWTH * self._seen_then))

    def rates(self) -> np.ndarray:
        """float64[rows, len(EDGES)], by the numbers of `row`; of MAX_AT_ONCE kinds at most they are new."""
        self._seen_then = self._seen
        for table in list(self._changed)[:MAX_AT_ONCE]:
            del self._changed[table]
            if not table.row:  # its tenant was forgotten
                continue
            while table.row >= len(self._rates):
                self._rates = np.concatenate([self._rates, np.tile(self._rates[0], (len(self._rates), 1))])
            self._rates[table.row] = rates_of(table.chances())
        return self._rates
