"""What it costs to evict short leaves below a long prefix into host memory, such as choices that were scored.

    python -m bench.eviction [--quick]

CALLS times CHOICES choices of 6 tokens are scored after the same prefix; then another prompt takes all pages. The times
are those of its steps, in which everything is evicted; the memory is the most that the process has had.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np

from bench.common import save, table
from bench.scheduler import NullLink
from radixrt.messages import Run, Sampling
from radixrt.worker.execution.fake_runner import FakeRunner
from radixrt.worker.loop import Identity, Worker
from radixrt.worker.scheduler.scheduler import Limits

CALLS, CHOICES, LENGTH = 30, 128, 6
POOL = 160_000
"""Pages of one token."""


def run(worker: Worker, prompts: list[np.ndarray], score_from: int | None = None) -> list[float]:
    """Serve prompts at once. Returns the CPU seconds of each step."""
    for ids in prompts:
        number = worker._newest_run + 1
        worker._add(
            Run(
                id=number, namespace="tenant", ids=ids.tobytes(), prompt_len=len(ids), sampling=Sampling(max_tokens=0),
                score_from=score_from,
            )
        )  # fmt: skip
    times = []
    while worker.scheduler.has_work:
        began = time.thread_time()
        worker._reply(worker._step())
        times.append(time.thread_time() - began)
    return times


def measure(prefix: int, calls: int) -> dict[str, float]:
    runner = FakeRunner(POOL, 1, 32_000, 200_000, num_host_pages=2_000_000)
    worker = Worker(
        runner, Identity("bench", "fake"), NullLink, limits=Limits(8192, 2 * CHOICES), max_model_len=200_000
    )
    worker._link = NullLink()
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 32_000, prefix, dtype=np.int32)
    for _ in range(calls):
        choices = [np.concatenate([shared, rng.integers(3, 32_000, LENGTH, dtype=np.int32)]) for _ in range(CHOICES)]
        run(worker, choices, prefix)
    times = run(worker, [rng.integers(3, 32_000, POOL - 10, dtype=np.int32)])
    worker.cache.check()
    cached = prefix + calls * CHOICES * (LENGTH - 1)  # the last token of a choice has no KV
    assert worker.cache.tier.used_pages >= cached - 10, "all but a few pages that were left are in host memory"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"worst_step_ms": max(times) * 1e3, "all_steps_ms": sum(times) * 1e3, "peak_mb": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small case, to see that it runs")
    args = parser.parse_args()
    cases = [(1_000, 2)] if args.quick else [(25_000, CALLS), (100_000, CALLS)]
    rows = [{"prefix": prefix, "leaves": calls * CHOICES} | measure(prefix, calls) for prefix, calls in cases]
    print(table(rows))
    if not args.quick:
        save("eviction", rows)


if __name__ == "__main__":
    main()
