"""What is learned of when contexts return."""

from __future__ import annotations

import numpy as np
import pytest

from radixrt.worker.cache import return_times
from radixrt.worker.cache.return_times import EDGES, LONGEST_SECONDS, ReturnTimes, rates_of

TOOL = ("tool run_tests", 4)


def seen(times: ReturnTimes, tenant: str, kind: tuple, seconds: float, count: int = 50, now: float = 0.0) -> None:
    waits = [times.wait(tenant, kind, now) for _ in range(count)]
    for wait in waits:
        times.returned(wait, now + seconds)


def rate(times: ReturnTimes, tenant: str, kind: tuple, age: float) -> float:
    return float(times.rates()[times.row(tenant, kind)][np.searchsorted(EDGES, age, side="right") - 1])


def test_a_rate_is_the_most_that_any_waiting_time_gives() -> None:
    chances = np.random.default_rng(0).uniform(0, 0.5, len(EDGES) - 1)
    alive = np.concatenate([[1.0], np.cumprod(1 - chances)])

    def slow(first: int) -> float:
        best = seconds = 0.0
        for step in range(first, len(chances)):
            seconds += (EDGES[step + 1] - EDGES[step]) * (alive[step] + alive[step + 1]) / 2
            best = max(best, (alive[first] - alive[step + 1]) / seconds)
        return best

    assert np.allclose(rates_of(chances), [*map(slow, range(len(chances))), 0.0])


def test_of_what_nothing_is_known_the_last_used_is_worth_most() -> None:
    rates = ReturnTimes().rates()
    assert len(rates) == 1
    assert (np.diff(rates[0]) < 0).all()


def test_a_slow_tool_is_worth_less_until_it_is_about_to_return() -> None:
    times = ReturnTimes()
    seen(times, "t", ("tool ls", 1), 2.0)
    seen(times, "t", TOOL, 60.0)
    assert rate(times, "t", ("tool ls", 1), 0.0) > 5 * rate(times, "t", TOOL, 0.0)
    assert rate(times, "t", TOOL, 50.0) > 3 * rate(times, "t", TOOL, 0.0)
    assert rate(times, "t", TOOL, 50.0) > rate(times, "t", ("tool ls", 1), 50.0)


def test_what_is_still_waited_for_counts_as_far_as_it_has_come() -> None:
    """Otherwise all that was seen in the first minutes would have returned soon."""
    times = ReturnTimes()
    seen(times, "t", ("stop",), 1.0, count=10)
    soon = rate(times, "t", ("stop",), 0.0)
    for _ in range(90):
        times.wait("t", ("stop",), 1.0)
    times.advance(100.0)
    assert rate(times, "t", ("stop",), 0.0) < soon / 4


def test_only_what_was_seen_until_then_counts() -> None:
    times, other = ReturnTimes(), ReturnTimes()
    for one in (times, other):
        seen(one, "t", TOOL, 5.0)
    wait = times.wait("t", TOOL, 10.0)
    other.wait("t", TOOL, 10.0)
    assert np.array_equal(times.rates(), other.rates()), "that it will return is not known yet"
    times.returned(wait, 12.0)
    assert not np.array_equal(times.rates(), other.rates())


def test_a_special_kind_begins_with_the_estimate_of_the_general_one() -> None:
    times = ReturnTimes()
    seen(times, "t", ("tool ls", 1), 2.0, count=500)
    times.wait("t", ("tool ls", 9), 2.0)
    assert rate(times, "t", ("tool ls", 9), 0.0) == pytest.approx(rate(times, "t", ("tool ls",), 0.0), rel=0.3)
    assert times.row("t", ("tool ls", 5)) == times.row("t", ("tool ls",)), "of which none was seen"


def test_tenants_do_not_influence_each_other() -> None:
    times, alone = ReturnTimes(), ReturnTimes()
    for one in (times, alone):
        seen(one, "mine", TOOL, 5.0)
    seen(times, "other", TOOL, 500.0, count=300)
    assert rate(times, "mine", TOOL, 0.0) == rate(alone, "mine", TOOL, 0.0)
    assert times.row("third", TOOL) == 0


def test_what_is_remembered_is_bounded() -> None:
    times = ReturnTimes()
    for tenant in range(3 * return_times.MAX_TENANTS):
        times.wait(str(tenant), TOOL, float(tenant))
    assert len(times._tables) == return_times.MAX_TENANTS
    assert times.row("0", TOOL) == 0
    for tenant in range(10):
        for name in range(return_times.MAX_KINDS):
            times.wait(f"many {tenant}", (f"tool {name}", 1), 1000.0)
    while times._changed:
        rows = len(times.rates())
    assert rows <= 2 * return_times.MAX_TABLES
    assert times.row("many 9", ("tool 0",)) and not times.row("many 9", (f"tool {return_times.MAX_KINDS - 1}",))
    times.advance(1e9)
    assert not any(times._waits), "who does not return is given up"


def test_what_is_long_ago_counts_less() -> None:
    times = ReturnTimes()
    seen(times, "t", TOOL, 100.0, count=3000)
    slow = rate(times, "t", TOOL, 0.0)
    seen(times, "t", TOOL, 1.0, count=9000, now=LONGEST_SECONDS)
    assert rate(times, "t", TOOL, 0.0) > 20 * slow


def test_what_a_forgotten_tenant_waited_for_changes_nothing_of_others() -> None:
    times = ReturnTimes()
    wait = times.wait("old", TOOL, 0.0)
    times.delete("old")
    seen(times, "new", TOOL, 50.0)
    before = times.rates().copy()
    times.returned(wait, 50.0)
    times.wait("new", ("stop",), 50.0)
    assert np.array_equal(times.rates()[: len(before)][times.row("new", TOOL)], before[times.row("new", TOOL)])
