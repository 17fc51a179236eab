"""What counts as a step that does not end: by what was seen before, and by the clock of who looks."""

from __future__ import annotations

import math

import pytest

from radixrt.process import watchdog
from radixrt.process.watchdog import KNOWN_STEPS, MIN_RESTART_SECONDS, MIN_SECONDS, WINDOW_STEPS, Watchdog


def after(steps: int, seconds: float = 0.05, tokens: int = 100, hard: float = 300.0) -> Watchdog:
    dog = Watchdog(hard)
    for _ in range(steps):
        dog.launched(tokens)
        dog.finished(tokens, seconds)
    return dog


def stalled(dog: Watchdog, seconds: float) -> Watchdog:
    """Nothing is done for so many seconds, and it is looked once a second."""
    for now in range(math.ceil(seconds) + 1):
        dog.look(float(now))
    return dog


def test_before_anything_is_known_only_the_hard_limit_counts():
    """The first steps may compile kernels for minutes."""
    for steps in (0, KNOWN_STEPS - 1):
        dog = stalled(after(steps), 299)
        assert not dog.stuck and not dog.hangs
        dog.look(301.0)
        assert dog.stuck and dog.hangs


@pytest.mark.parametrize(
    ("seconds", "tokens", "next_tokens", "limit"),
    [
        (0.05, 100, 1, MIN_SECONDS),
        (0.05, 100, 100, MIN_SECONDS),
        (2.0, 100, 100, 40.0),
        (2.0, 100, 300, 120.0),
        (2.0, 8192, 8, 40.0),
        (60.0, 100, 100, 300.0),
    ],
    ids=["short", "as before", "slow", "slow and larger", "slow and smaller", "never beyond the hard one"],
)
def test_the_limit_is_that_of_the_slowest_step_for_as_many_tokens(seconds, tokens, next_tokens, limit):
    dog = after(KNOWN_STEPS, seconds, tokens)
    dog.launched(next_tokens)
    dog.launched(1)  # the next one is launched while that one runs
    assert dog.limit == pytest.approx(limit)


def test_what_was_slow_once_is_forgotten():
    dog = after(1, seconds=200.0)
    for _ in range(2 * WINDOW_STEPS):
        dog.launched(100)
        dog.finished(100, 0.05)
    assert dog.limit == MIN_SECONDS


def test_a_process_is_replaced_later_than_its_requests_go_elsewhere():
    dog = stalled(after(KNOWN_STEPS), MIN_SECONDS + 1)
    assert dog.stuck and not dog.hangs
    for now in range(int(MIN_SECONDS) + 2, int(MIN_RESTART_SECONDS) + 2):
        dog.look(float(now))
    assert dog.hangs
    dog.finished(100, 130.0)
    assert dog.look(200.0) == 0.0 and not dog.stuck and not dog.hangs


def test_time_in_which_nobody_looked_does_not_count():
    """The machine was suspended, or the whole process was stopped, or got no processor."""
    dog = after(KNOWN_STEPS)
    for now in (0.0, 1.0, 4000.0, 4001.0, 4002.0):
        dog.look(now)
    assert dog.stalled == pytest.approx(3 + watchdog.MAX_LOOK_SECONDS) and not dog.stuck


def test_who_has_nothing_to_do_gets_on():
    dog = after(KNOWN_STEPS)
    for now in range(1000):
        dog.moved()
        assert dog.look(float(now)) == 0.0


def test_without_a_limit_nothing_hangs():
    dog = stalled(Watchdog(0.0), 5000)
    assert dog.stalled > 4000 and not dog.stuck and not dog.hangs
