"""CPU time of a worker's step without a model: plan, apply, page accounting, events, the message to the router.

    python -m bench.scheduler [--quick]

256 requests with 16,384 tokens each decode one token per step. The reference is a minimal step in plain Python: one
loop over the requests that takes a page, records it, and appends the token.
"""

from __future__ import annotations

import argparse
import time
from array import array

import msgspec
import numpy as np

from bench.common import save, table
from radixrt.messages import Run, Sampling
from radixrt.worker.execution.fake_runner import FakeRunner
from radixrt.worker.loop import Identity, Worker
from radixrt.worker.scheduler.scheduler import Limits

STEPS = 400


class NullLink:
    """A link that discards what the worker sends, and receives nothing."""

    def __init__(self) -> None:
        self.sent = 0

    def send(self, payload: bytes) -> None:
        self.sent += len(payload)

    def recv(self, timeout: float | None) -> bytes | None:
        return None

    def broke(self) -> bool:
        return False

    def close(self) -> None:
        pass


def make_worker(requests: int, history: int, page_size: int, shared: int) -> Worker:
    """A worker with requests that all decode already."""
    pages = requests * (history + 2 * STEPS) // page_size + 8
    runner = FakeRunner(pages, page_size)
    worker = Worker(
        runner, Identity("bench", "fake"), NullLink, limits=Limits(1 << 20, requests), max_model_len=history * 2
    )
    worker._link = NullLink()
    rng = np.random.default_rng(0)
    trunk = rng.integers(3, 32_000, shared, dtype=np.int32)
    for number in range(requests):
        ids = np.concatenate([trunk, rng.integers(3, 32_000, history - shared, dtype=np.int32)])
        sampling = Sampling(max_tokens=2 * STEPS + 8, temperature=0.0, ignore_eos=True)
        worker._add(Run(id=number, namespace="", ids=ids.tobytes(), prompt_len=history, sampling=sampling))
    while worker.scheduler.num_waiting or worker.scheduler.running.prefilling:
        worker._reply(worker._step())
    worker.cache.check()
    return worker


def step_us(worker: Worker) -> dict[str, float]:
    """CPU microseconds of this thread by part of a step; medians over STEPS steps."""
    clock = time.thread_time_ns
    times = np.zeros((STEPS, 4))
    for step in range(STEPS):
        t0 = clock()
        plan = worker.scheduler.plan()
        t1 = clock()
        result = worker.runner.launch(plan)()
        t2 = clock()
        outputs = worker.scheduler.apply(plan, result)
        t3 = clock()
        worker._reply(outputs)
        times[step] = t1 - t0, t2 - t1, t3 - t2, clock() - t3
    plan_us, fake_us, apply_us, reply_us = np.median(times, axis=0) / 1000
    return {
        "plan_us": plan_us,
        "apply_us": apply_us,
        "reply_us": reply_us,
        "scheduler_us": plan_us + apply_us,
        "step_us": plan_us + apply_us + reply_us,
        "fake_runner_us": fake_us,
    }


def plain_step_us(requests: int, history: int) -> float:
    """The reference: a step's bookkeeping as one Python loop."""
    tables = [list(range(history)) for _ in range(requests)]
    tokens = [array("i", range(history)) for _ in range(requests)]
    free, times = list(range(requests * STEPS)), []
    for _ in range(STEPS):
        began = time.thread_time_ns()
        slots, outputs = [], []
        for pages, ids in zip(tables, tokens, strict=True):
            pages.append(free.pop())
            slots.append(pages[-1])
            ids.append(7)
            outputs.append((len(ids), 7))
        msgspec.msgpack.encode((slots, outputs))
        times.append(time.thread_time_ns() - began)
    return float(np.median(times)) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small case, to see that it runs")
    args = parser.parse_args()
    cases = (
        [(32, 1024, 1, 0)]
        if args.quick
        else [(256, 16_384, 1, 0), (256, 16_384, 1, 16_000), (256, 16_384, 16, 0), (64, 4096, 1, 0)]
    )
    rows = []
    for requests, history, page_size, shared in cases:
        case = {"requests": requests, "history": history, "page_size": page_size, "shared": shared}
        rows.append(case | step_us(make_worker(*case.values())) | {"plain_loop_us": plain_step_us(requests, history)})
    print(table(rows))
    if not args.quick:
        save("scheduler", rows, steps=STEPS)


if __name__ == "__main__":
    main()
