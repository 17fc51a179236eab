"""What the live page costs the router: CPU time of its process with one page open, and with none.

    python -m bench.live [--seconds 10] [--runs 5]

A router with its front end in one process, and a fake worker that makes a step every 5 ms: 64 streams, and requests of
4,096 token ids (as `bench.front`), and nothing at all. The page reads the stream of states, and asks for the tree every
5 seconds. Runs with and without the page take turns; the figures are medians.
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
from radixrt.demo.checkpoint import make_checkpoint

STREAMS, REQUESTS = 64, 512
TREE_SECONDS = 5.0
LOADS: dict[str, dict[str, Any]] = {
    "64 streams": {"streams": STREAMS, "tokens": TOKENS, "prompt": PROMPT, "text": True},
    "requests of 4,096 ids": {"requests": REQUESTS, "concurrency": 64, "tokens": 1, "prompt": LONG, "text": False},
    "nothing": {},
}


class Page(threading.Thread):
    """What a browser does that shows the page."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._ended = threading.Event()
        self.states = self.bytes = 0
        self.start()

    def run(self) -> None:
        tree_at = 0.0
        with httpx.Client(base_url=self._url, timeout=30) as client, client.stream("GET", "/v1/live") as stream:
            for line in stream.iter_lines():
                self.bytes += len(line)
                if self._ended.is_set():
                    return
                if line.startswith("data: ") and '"recent"' in line:
                    self.states += 1
                    if time.monotonic() >= tree_at:
                        tree_at = time.monotonic() + TREE_SECONDS
                        client.get("/v1/live/tree").raise_for_status()

    def stop(self) -> None:
        self._ended.set()
        self.join()


@contextlib.contextmanager
def page(url: str, opened: bool) -> Iterator[Page | None]:
    shown = Page(url) if opened else None
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
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run")
    parser.add_argument("--runs", type=int, default=5, help="with and without the page, of each load")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder))
        with stack(Path(folder)) as (url, _, pids):
            load = Load("http", url)
            load.run(**LOADS["requests of 4,096 ids"])
            for name, work in LOADS.items():
                found: dict[bool, list[tuple[float, float, int]]] = {False: [], True: []}
                states = size = 0
                for _ in range(args.runs):
                    for opened in (False, True):
                        with page(url, opened) as shown:
                            found[opened].append(measure(load, work, args.seconds, pids))
                        if shown:
                            states, size = states + shown.states, size + shown.bytes
                rows.append(row(name, found, bool(work)) | {"kB a state": size / states / 1000})
            load.close()
    print("the router's CPU\n", table(rows), sep="\n")
    save("live", rows, seconds=args.seconds, runs=args.runs, unit="ms of CPU")


def row(name: str, found: dict[bool, list[tuple[float, float, int]]], loaded: bool) -> dict[str, Any]:
    """CPU a load with and without the page, and what the page takes of it in a second."""
    each = {
        opened: median(cpu / (loads if loaded else took) for cpu, took, loads in runs) * 1000
        for opened, runs in found.items()
    }
    busy = median(cpu / took for cpu, took, _ in found[False]) * 1000
    rate = median(loads / took for _, took, loads in found[True]) if loaded else 1.0
    return {
        "load": name,
        "each": "load" if loaded else "second",
        "without": each[False],
        "with a page": each[True],
        "ratio": each[True] / each[False],
        "busy ms/s without": busy,
        "page ms/s": (each[True] - each[False]) * rate,
    }


if __name__ == "__main__":
    main()
