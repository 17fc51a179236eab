"""What the live page costs the router: CPU time of its process while states are asked for, and while none are.

    python -m bench.live [--seconds 5] [--runs 3]

A router with its front end in one process, and a fake worker that makes a step every 5 ms: 64 streams, and requests of
4,096 token ids (as `bench.front`), and nothing at all. A page makes the router answer one state a second, and the tree
every five seconds. So that the difference is above the noise, RATE times as many are asked for here, each by a request
of its own, and the difference is divided by RATE. Runs with and without take turns; the figures are medians.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from bench.common import save, table
from bench.front import LONG, PROMPT, TOKENS, Load, cpu_seconds, stack
from radixrt.client.transports import NATIVE_PATH
from radixrt.demo.checkpoint import make_checkpoint

STREAMS, REQUESTS = 64, 512
TREE_SECONDS, RATE = 5, 20
LOADS: dict[str, dict[str, Any]] = {
    "64 streams": {"streams": STREAMS, "tokens": TOKENS, "prompt": PROMPT, "text": True},
    "requests of 4,096 ids": {"requests": REQUESTS, "concurrency": 64, "tokens": 1, "prompt": LONG, "text": False},
    "nothing": {},
}


class Pages(threading.Thread):
    """Asks as RATE pages would that share nothing."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._ended = threading.Event()
        self.states = self.bytes = 0
        self.start()

    def run(self) -> None:
        state, tree = ({"type": "live", "id": 1, "part": part} for part in ("state", "tree"))
        with httpx.Client(base_url=self._url, timeout=30) as client:
            while not self._ended.wait(1 / RATE):
                self.states += 1
                self.bytes += len(client.post(NATIVE_PATH, json=state).raise_for_status().content)
                if self.states % TREE_SECONDS == 0:  # each of its own size, as outlines are kept for a while
                    client.post(NATIVE_PATH, json=tree | {"most": 1900 + self.states % 100})

    def stop(self) -> None:
        self._ended.set()
        self.join()


@contextlib.contextmanager
def pages(url: str, opened: bool) -> Iterator[Pages | None]:
    shown = Pages(url) if opened else None
    try:
        yield shown
    finally:
        if shown:
            shown.stop()


def measure(load: Load, work: dict[str, Any], seconds: float, pids: dict[str, int]) -> tuple[float, float, int]:
    """Run a load again and again. Returns (the router's CPU seconds, seconds, loads)."""
    began, before, loads = time.monotonic(), cpu_seconds(pids), 0
    while time.monotonic() - began < seconds:
        if work:
            load.run(**work | ({"first": int(time.monotonic() * 1e6) % 10**9} if "requests" in work else {}))
        else:
            time.sleep(0.1)
        loads += 1
    after, took = cpu_seconds(pids), time.monotonic() - began
    return after["router"] - before["router"], took, loads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run")
    parser.add_argument("--runs", type=int, default=3, help="with and without the page, of each load")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder))
        with stack(Path(folder)) as (url, _, pids):
            load = Load("http", url)
            load.run(**LOADS["requests of 4,096 ids"])
            for name, work in LOADS.items():
                found: dict[bool, list[tuple[float, float, int]]] = {False: [], True: []}
                states = size = took = 0.0
                for _ in range(args.runs):
                    for opened in (False, True):
                        with pages(url, opened) as shown:
                            found[opened].append(measure(load, work, args.seconds, pids))
                        if shown:
                            states, size, took = states + shown.states, size + shown.bytes, took + found[True][-1][1]
                rows.append(row(name, found, bool(work), states / took) | {"kB a state": size / states / 1000})
            load.close()
    print("the router's CPU\n", table(rows), sep="\n")
    save("live", rows, seconds=args.seconds, runs=args.runs, asked=RATE)


def row(name: str, runs: dict[bool, list[tuple[float, float, int]]], loaded: bool, states: float) -> dict[str, Any]:
    """CPU a load, or a second, without and with `states` states a second, and what one state adds."""
    each = {
        asked: median(cpu / (loads if loaded else took) for cpu, took, loads in found) for asked, found in runs.items()
    }
    busy = median(cpu / took for cpu, took, _ in runs[False])
    rate = median(loads / took for _, took, loads in runs[True]) if loaded else 1.0
    a_state = (each[True] - each[False]) * rate / states
    return {
        "load": name,
        "ms each without": each[False] * 1000,
        "with": each[True] * 1000,
        "states/s": states,
        "ms a state": a_state * 1000,
        "router busy": busy,
        "a page's share of it": a_state / busy,
    }


if __name__ == "__main__":
    main()
