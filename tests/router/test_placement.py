"""Placement by a table: each row says where a request belongs and why."""

from __future__ import annotations

import pytest

from radixrt.router.placement.cost import (
    CROWDING_WEIGHT,
    FAILURE_SECONDS,
    RECOMPUTE_WEIGHT,
    Candidate,
    place,
    recompute_weight,
    shared_cost,
    time_to_first_token,
)


def worker(
    number: int, hit=0, queued=0, requests=0, max_running=8, free=10**6, rate=10_000.0, step=0.01, empty=0, wanted=0,
    **more,
) -> Candidate:  # fmt: skip
    return Candidate(number, hit, queued, requests, max_running, free, rate, step, empty, wanted, 10_000, **more)


@pytest.mark.parametrize(
    ("why", "tokens", "workers", "winner"),
    [
        ("alone", 100, [worker(0)], 0),
        ("a long hit wins", 4000, [worker(0), worker(1, hit=3900)], 1),
        ("a hit worth less than the queue before it loses", 1000, [worker(0, hit=500, queued=9000), worker(1)], 1),
        ("a hit worth more than the queue wins", 9000, [worker(0, hit=8000, queued=5000), worker(1)], 0),
        ("a high match ratio of little work pulls nobody", 200, [worker(0, hit=190, queued=2000), worker(1)], 1),
        ("equal: fewer requests", 100, [worker(0, requests=3), worker(1, requests=1)], 1),
        ("equal and idle: the emptier cache", 100, [worker(0, empty=10), worker(1, empty=500)], 1),
        ("a beginning that all share decides nothing", 100, [worker(0, hit=4, requests=2), worker(1)], 1),
        ("noise of the rates is a tie", 100, [worker(0, requests=3, rate=10_500.0), worker(1)], 1),
        ("a much faster worker wins", 8000, [worker(0, rate=1000.0), worker(1, rate=10_000.0, requests=3)], 1),
        (
            "noise has nobody compute a prefix twice",
            2258,
            [worker(0, hit=2241, queued=2241, requests=1, rate=8000.0, step=0.02), worker(1, rate=12_000.0, step=0.0)],
            0,
        ),
        ("no step has to end where nothing runs", 25, [worker(0, step=0.05, empty=500), worker(1, step=0.004)], 0),
        ("no place left, and steps are long", 500, [worker(0, hit=450, requests=8, step=0.05), worker(1)], 1),
        ("no pages left", 5000, [worker(0, hit=1000, free=100, requests=1), worker(1)], 1),
        (
            "a failure outweighs a short queue",
            100,
            [worker(0, failed_share=0.25), worker(1, queued=4000, requests=5)],
            1,
        ),
        ("but not a long one", 100, [worker(0, failed_share=0.25), worker(1, queued=6000, requests=5)], 0),
        ("a hit does not outweigh it", 1000, [worker(0, hit=990, failed_share=0.25), worker(1)], 1),
        ("the one that fails less", 100, [worker(0, failed_share=0.9), worker(1, failed_share=0.6)], 1),
        (
            "the rate of a first prompt does not count",
            4000,
            [worker(0, rate=667.0, rate_known=False), worker(1, hit=9)],
            0,
        ),
        ("that of several does", 4000, [worker(0, rate=667.0), worker(1, hit=9)], 1),
        (
            "idle while others work, it may have become faster",
            4000,
            [worker(0, rate=667.0, idle_seconds=300.0), worker(1, requests=1, queued=9000)],
            0,
        ),
        ("not so soon", 4000, [worker(0, rate=667.0, idle_seconds=3.0), worker(1, requests=1, queued=9000)], 1),
        ("nor if all are idle", 4000, [worker(0, rate=667.0, idle_seconds=300.0), worker(1, idle_seconds=300.0)], 1),
        ("nobody has measured", 100, [worker(0, rate=0.0, step=0.0, queued=10**4), worker(1, rate=0.0, step=0.0)], 1),
    ],
)
def test_place(why, tokens, workers, winner):
    assert place(tokens, workers)[0].worker == winner, why


@pytest.mark.parametrize(
    ("why", "requests", "sharers", "winner"),
    [
        ("for a moment's queue nobody computes again what another holds", 1, [0] * 8, 0),
        ("nor where nobody was asked", 1, [], 0),
        ("an idle worker keeps nobody waiting", 0, [0] * 8, 1),
        ("nor where nobody was asked", 0, [], 1),
        ("what many share is soon everywhere", 1, [9] * 8, 1),
        ("of which the beginning is not enough", 1, [9] * 2 + [0] * 6, 0),
    ],
)
def test_what_another_holds_counts_twice_for_who_is_busy(why, requests, sharers, winner):
    holds, has_not = worker(0, hit=2000, queued=3000, requests=4), worker(1, requests=requests)
    assert place(2100, [holds, has_not], sharers)[0].worker == winner, why


def test_a_queue_longer_than_twice_what_is_missing_is_left():
    for queued, winner in ((3500, 0), (5000, 1)):
        holds, has_not = worker(0, hit=2000, queued=queued, requests=4), worker(1, requests=1)
        assert place(2100, [holds, has_not])[0].worker == winner


def test_tokens_in_shares():
    assert shared_cost(100, 900, []) == shared_cost(100, 900, [0] * 8) == 800
    assert shared_cost(0, 800, [7, 3, 1, 0, 0, 0, 0, 0]) == 100 / 8 + 100 / 4 + 100 / 2 + 500
    assert shared_cost(150, 800, [7, 3, 1, 0, 0, 0, 0, 0]) == 50 / 4 + 100 / 2 + 500


@pytest.mark.parametrize(
    ("requests", "wanted", "times"),
    [
        (0, 20_000, 1),
        (1, 5_000, RECOMPUTE_WEIGHT),
        (40, 0, RECOMPUTE_WEIGHT),
        (40, 5_000, RECOMPUTE_WEIGHT),
        (40, 7_500, RECOMPUTE_WEIGHT + 20 * CROWDING_WEIGHT),
        (40, 10_000, RECOMPUTE_WEIGHT + 40 * CROWDING_WEIGHT),
        (40, 99_000, RECOMPUTE_WEIGHT + 40 * CROWDING_WEIGHT),
    ],
)
def test_what_a_token_counts_for(requests, wanted, times):
    assert recompute_weight(worker(0, requests=requests, wanted=wanted)) == pytest.approx(times)
    assert recompute_weight(worker(0, requests=requests, wanted=wanted)._replace(total_tokens=0)) == min(
        times, RECOMPUTE_WEIGHT
    )


def test_where_caches_are_full_a_longer_queue_is_waited_for():
    for wanted, winner in ((5_000, 1), (12_500, 0)):
        holds, full = worker(0, hit=2000, queued=6000, requests=4), worker(1, requests=4, wanted=wanted)
        assert place(2100, [holds, full])[0].worker == winner


def test_an_idle_worker_computes_what_many_will_ask_of_it():
    for others, winner in ((0, 0), (1, 0), (9, 1)):
        holds, idle = worker(0, hit=2000, queued=700, requests=4), worker(1)
        assert place(2100, [holds, idle], [others] * 8)[0].worker == winner


def test_estimate_is_the_formula_in_seconds():
    assert time_to_first_token(1000, worker(0, hit=600)) == pytest.approx(0.04)
    assert time_to_first_token(1000, worker(0, hit=600, queued=1600, requests=1)) == pytest.approx(0.2 + 0.01)
    crowded = worker(0, hit=0, requests=9, max_running=8)
    assert time_to_first_token(100, crowded) == pytest.approx(0.01 + 0.01 + 2 * 128 * 0.01 / 8)
    bad = worker(0, hit=600, failed_share=0.25)
    assert time_to_first_token(1000, bad) == pytest.approx(0.04 + 0.25 * FAILURE_SECONDS)
    full = worker(0, requests=2, free=40)
    assert time_to_first_token(100, full) == pytest.approx(0.01 + 0.01 + 60 * 0.01 / 2)


def test_more_work_never_looks_sooner():
    estimates = [time_to_first_token(5000, worker(0, hit=hit, queued=100)) for hit in range(0, 5000, 500)]
    assert estimates == sorted(estimates, reverse=True)
    estimates = [time_to_first_token(500, worker(0, requests=n)) for n in range(20)]
    assert estimates == sorted(estimates)


def test_a_shared_trunk_fills_both_workers():
    """400 requests behind a 2000-token trunk, 100 new tokens each, arriving at once: a queue counts as work."""
    queued, requests, hits = [0, 0], [0, 0], [2000, 0]
    for _ in range(400):
        best, _ = place(2100, [worker(n, hits[n], queued[n], requests[n], max_running=1000) for n in (0, 1)])
        queued[best.worker] += 2100 - hits[best.worker]
        requests[best.worker] += 1
        hits[best.worker] = 2000
    assert min(requests) > 150


def test_no_workers_is_an_error():
    with pytest.raises(ValueError):
        place(10, [])
