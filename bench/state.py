"""What `--state-path` costs: CPU time of the router's process and time to first token with it and without, and the time
to start with much on disk.

    python -m bench.state [--runs 5] [--quick]

A router with its front end in one process, and a fake worker that takes no time. A chat has 30 turns, as in
`bench.sessions`; a program 30 turns, each a request over ZMQ that continues a state. The router's CPU, its writing
thread included, is divided by the turns. Runs with and without take turns; the figures are medians. Each turn must hit
all of the turn before it. Then the folder is filled, and the start timed up to an answer over HTTP.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np

from bench.common import save, table
from bench.sessions import TURNS, Talk
from radixrt.client import Client
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.demo.checkpoint import make_checkpoint
from radixrt.launch.launcher import Stack
from radixrt.messages import NO_TENANT, GeneratedSegment, Sampling, StatePrompt, TextSegment
from radixrt.process.ports import free_tcp_address
from radixrt.router.persistence.store import PersistentStore
from radixrt.router.programs.prompt_builder import Generated, Part, State
from radixrt.router.programs.saved_states import Key, SavedStates

CHATS, PROGRAMS = 4, 8
ANSWER, WORDS = 64, 480
CACHE = 1 << 22
PROGRAM_TOKENS = 1000
"""Of each part of a stored state; a state has two of 1,000 tokens more than the one before it."""


def stack(folder: Path, state_path: str) -> Stack:
    router = RouterConfig(
        model=str(folder), report_tokens=CACHE, client_address=free_tcp_address(), state_path=state_path
    )
    worker = WorkerConfig(model=str(folder), fake="0,0", max_total_tokens=CACHE, max_num_batched_tokens=1 << 16)
    frontend = FrontendConfig(model=str(folder), port=int(free_tcp_address().rpartition(":")[2]))
    return Stack(StackConfig(resolve(router), worker, resolve(frontend)))


@contextmanager
def serving(folder: Path, state_path: str) -> Iterator[Stack]:
    with stack(folder, state_path) as running:
        running.start()
        yield running


class Side:
    """A running stack, and what was measured of it."""

    def __init__(self, running: Stack) -> None:
        self._port, self._address = running._port, running._client_address
        (self._pid,) = (child.process.pid for child in running._subprocesses if child.role == "router")
        self._number = itertools.count()
        self.figures: dict[str, list[float]] = {}

    def _note(self, name: str, value: float) -> None:
        self.figures.setdefault(name, []).append(value)

    def _cpu_seconds(self) -> float:
        """Of all threads of the router, in nanoseconds, not in ticks of a clock."""
        threads = Path(f"/proc/{self._pid}/task").iterdir()
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9

    def chats(self, count: int) -> None:
        before, firsts = self._cpu_seconds(), []
        for _ in range(count):
            talk, hit = Talk(self._port, next(self._number)), 0
            for _ in range(TURNS):
                talk.say()
                seconds, usage = talk.ask()
                assert usage["prompt_tokens_details"]["cached_tokens"] >= hit
                hit = usage["prompt_tokens"] + usage["completion_tokens"] - 1
            firsts.append(seconds)
            talk.close()
        time.sleep(0.2)  # what is written behind counts
        self._note("us a turn of a chat", (self._cpu_seconds() - before) / count / TURNS * 1e6)
        self._note(f"ms to the first token of turn {TURNS}", median(firsts) * 1e3)

    def programs(self, count: int) -> None:
        before, sampling = self._cpu_seconds(), Sampling(max_tokens=ANSWER, ignore_eos=True)
        with Client(self._address) as client:
            for _ in range(count):
                scope, hit = f"bench-{next(self._number):012}", 0
                for turn in range(TURNS):
                    said = [TextSegment(f"{scope} {turn} " + "word " * WORDS)]
                    usage = client.generate(StatePrompt(scope, turn, said, turn + 1, turn > 0), sampling).usage
                    assert usage.cached_tokens >= hit
                    hit = usage.prompt_tokens + usage.completion_tokens - 1
        time.sleep(0.2)
        self._note("us a turn of a program", (self._cpu_seconds() - before) / count / TURNS * 1e6)


def compare(folder: Path, runs: int, chats: int, programs: int) -> list[dict[str, Any]]:
    with ExitStack() as stacks:
        state_path = stacks.enter_context(tempfile.TemporaryDirectory())
        paths = {"without": "", "with": state_path}
        sides = {name: Side(stacks.enter_context(serving(folder, path))) for name, path in paths.items()}
        for run in range(runs + 1):
            for name in sorted(sides, reverse=run % 2 == 0):
                sides[name].chats(chats)
                sides[name].programs(programs)
            if run == 0:  # to warm up
                for side in sides.values():
                    side.figures.clear()
    rows = []
    for what in sides["with"].figures:
        without, with_path = (median(sides[name].figures[what]) for name in ("without", "with"))
        ratios = [b / a for a, b in zip(sides["without"].figures[what], sides["with"].figures[what], strict=True)]
        spread = {"least ratio": min(ratios), "most ratio": max(ratios)}
        rows.append({"what": what, "without": without, "with": with_path, "ratio": with_path / without} | spread)
    return rows


def fill(state_path: str, tokens: int) -> None:
    """Store programs of 10 turns, with so many tokens in all."""
    store = PersistentStore(state_path, 4 << 30)
    saved, rng, stored, number = SavedStates(store, b""), np.random.default_rng(0), 0, 0
    while stored < tokens:
        parts: list[Part] = []
        for turn in range(10):
            for kind in (Part, Generated):
                ids = rng.integers(0, 500, PROGRAM_TOKENS, "i4").tobytes()
                parts = [*parts, kind("text " * PROGRAM_TOKENS, ids)]
            answer = GeneratedSegment(ids, "text " * PROGRAM_TOKENS, None, Sampling())
            state = State(parts, [], len(parts), None, True, NO_TENANT, answer)
            saved.save(Key("default", f"scope-{number:016}", turn + 1), state)
            stored += 2 * PROGRAM_TOKENS
        number += 1
        store.flush(60)
    store.close()


def starts(folder: Path, runs: int, tokens: int) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as full:
        fill(full, tokens)
        paths = {"none": "", "an empty folder": empty, f"{tokens:,} tokens on disk": full}
        seconds: dict[str, list[float]] = {name: [] for name in paths}
        for run in range(runs):
            for name in random.Random(run).sample(list(paths), len(paths)):
                running = stack(folder, paths[name])
                began = time.perf_counter()
                with running:
                    running.start()
                    httpx.get(f"http://127.0.0.1:{running._port}/health").raise_for_status()
                    seconds[name].append(time.perf_counter() - began)
        size = sum(path.stat().st_size for path in Path(full).iterdir())
        for name, times in seconds.items():
            rows.append({"start with": name, "s": median(times), "least": min(times), "most": max(times)})
        rows[-1]["MB"] = size / 1e6
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less of all, to see that it runs")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()

    def scale(full: int, quick: int) -> int:
        return quick if args.quick else full

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_checkpoint(folder)
        rows = compare(folder, scale(args.runs, 1), scale(CHATS, 1), scale(PROGRAMS, 1))
        begun = starts(folder, scale(args.runs, 1), scale(1_000_000, 20_000))
    print("with and without --state-path\n", table(rows), "\n", table(begun), sep="\n")
    if not args.quick:
        save("state", rows, starts=begun, runs=args.runs)


if __name__ == "__main__":
    main()
