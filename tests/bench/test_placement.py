"""The simulation of bench.placement keeps the order of events."""

from __future__ import annotations

import pytest

from bench import placement


@pytest.mark.parametrize("load", ["chats", "bursts"])
def test_workers_compute_one_step_at_a_time(load):
    """A worker that took a message before the end of its step would answer out of order, which `measure` checks."""
    found = placement.measure(load, "radixrt", seed=0, scale=0.15)
    assert 0 < found["hits"] <= found["infinite"] + 0.01 and found["p50_ms"] <= found["p99_ms"]
