"""Mixed traffic, with the memory of each process over time: after it has warmed up, it does not grow."""

from __future__ import annotations

import random
import time

import pytest

from tests.chaos.conftest import MEBIBYTE, seconds
from tests.chaos.processes import Recorder
from tests.chaos.runs import Traffic, undisturbed
from tests.chaos.stack import Serve
from tests.chaos.traffic import make_jobs

FLAGS = ("--fake", "0,0.001", "--max-total-tokens", "30000", "--max-model-len", "4096")
FLAGS += ("--report-tokens", "100000", "--session-tokens", "50000", "--state-bytes", "1000000")
"""All that is kept is full before the measurement begins."""
MAX_GROWTH = 24 * MEBIBYTE
"""By which a process may grow in the measured part, by the line through its samples."""
MORE_DESCRIPTORS, MORE_THREADS = 24, 4


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_memory_does_not_grow_under_mixed_traffic(tmp_path, seed, notes):
    duration = seconds(45)
    with Serve(tmp_path, *FLAGS, workers=2) as serve:
        jobs = make_jobs(random.Random(seed), list(serve.tenants), 12, turns_compare=False)
        known = undisturbed(serve, jobs, formula=True)
        with Traffic(serve, jobs, known, seed) as traffic:
            time.sleep(duration / 3)
            since, recorder = time.monotonic(), Recorder(lambda: serve.pid, period=0.25)
            time.sleep(2 * duration / 3)
            measured, series = time.monotonic() - since, recorder.stop()
        notes.add("requests answered", dict(traffic.tally.done))
        notes.add("tokens compared", traffic.tally.tokens)
        notes.add_processes(series)
        for pid, one in series.items():
            growth = one.growth(since) * measured / MEBIBYTE
            notes.add(f"{one.name} {pid}, growth", f"{growth:.1f} MiB in {measured:.0f} s")
        assert not traffic.tally.retries
        serve.check_idle()
        assert not (bad := serve.bad_lines()), bad[0]
    for one in series.values():
        first, last = one.samples[0], one.samples[-1]
        assert one.growth(since) * measured < MAX_GROWTH, f"{one.name}: {first} -> {last}"
        assert last.descriptors <= first.descriptors + MORE_DESCRIPTORS, f"{one.name}: {first} -> {last}"
        assert last.threads <= first.threads + MORE_THREADS, f"{one.name}: {first} -> {last}"
