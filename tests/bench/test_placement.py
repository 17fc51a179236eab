"""The simulation of bench.placement keeps the order of events."""

from __future__ import annotations

import pytest

from bench import placement
from radixrt.messages import Run


@pytest.mark.parametrize("load", ["chats", "bursts"])
def test_workers_compute_one_step_at_a_time(load):
    """A worker that took a message before the end of its step would answer out of order, which `measure` checks."""
    found = placement.measure(load, "radixrt", seed=0, scale=0.15)
    assert 0 < found["hits"] <= found["infinite"] + 0.01 and found["p50_ms"] <= found["p99_ms"]


def placed(slow_first: float = 0.0, slow: float = 1.0, seconds: float = 12.0) -> list[tuple[float, str]]:
    """(time, worker) of each request of a fleet that is busy for two thirds of its time. A first step with a prompt
    takes `slow_first` seconds more on worker w0, and every prompt `slow` times as long as elsewhere."""
    found: list[tuple[float, str]] = []
    with placement.simulated("radixrt") as clock:
        fleet = placement.Fleet(clock, seed=0)
        runner, plain = fleet._workers["w0"].runner, fleet._workers["w0"].runner._seconds
        late = [slow_first]

        def took(plan):
            prompts = len(plan.tokens) > len(plan.requests)
            return plain(plan) * (slow if prompts else 1.0) + (late.pop() if prompts and late else 0.0)

        runner._seconds = took
        deliver = fleet._deliver

        def delivered(name, message):
            if isinstance(message, Run):
                found.append((clock.now, name))
            deliver(name, message)

        fleet._deliver = delivered
        for n in range(int(seconds * 27)):
            fleet.at(n / 27, lambda: fleet.ask(placement.tokens(fleet, 3500, 4500), 8))
        fleet.run()
    return found


def test_a_worker_whose_first_prompt_was_slow_is_soon_used_like_the_others():
    """It compiled kernels for 6 s, and the others did not."""
    when = [now for now, name in placed(slow_first=6.0) if name == "w0"]
    later = [now for now in when if now > 1.0]
    assert later and min(later) < 6.6
    assert len([now for now in later if now > 7.0]) > 0.15 * 5 * 27


def test_a_slow_worker_is_known_after_some_prompts():
    """One that takes ten times as long for a prompt gets few of them."""
    found = [name for now, name in placed(slow=10.0) if now > 3.0]
    assert found.count("w0") < 0.08 * len(found)
