"""Recorded agent sessions in simulated time, at the fleet of `bench.placement`.

    python -m bench.replay [--data FOLDER] [--sessions 96] [--at-once 48] [--cache 850000] [--host 1000000]

The sessions are of coding agents, recorded as lengths, times and hashes of blocks of 64 tokens (`kv_cache_tester`).
Each block becomes 64 random tokens; blocks of the system prompt are the same in all sessions in which it is as long. So
many sessions run at once; when one ends, the next one begins. A session sends its next request when it has its answer
and its recorded time to think has passed, at most LONGEST_PAUSE. Subagents run beside their session. The answers are
not the recorded ones, so the next request hits up to its prompt's part of the one before. So it is with `infinite`.

The choices are those of `bench.placement`, and one that keeps contexts for five seconds, however late next turns come;
the results, too, and the whole time that a session waited for answers.
"""

from __future__ import annotations

import argparse
import logging
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from bench.agents.sessions import DATA, LONGEST_PAUSE, block_ids, block_numbers, is_sent, read_blocks, system_prompt
from bench.common import save, table
from bench.placement import BY_ARRIVAL, BY_RETURNS, CONTEXTS_KEPT, NO_HOST, VOCAB, WORKERS, Fleet, results, simulated
from radixrt.worker.cache import retention

LONGEST, MAX_REQUESTS = 200_000, 30
"""The most tokens of a prompt, and requests of a session: it ends before."""
KEPT_BRIEFLY = "kept for 5 s"
CHOICES = "radixrt", BY_RETURNS, KEPT_BRIEFLY, BY_ARRIVAL, CONTEXTS_KEPT, "most hits", "fewest requests", NO_HOST


class Session:
    """One session: makes its prompts and sends them in turn."""

    def __init__(self, fleet: Fleet, recorded: dict[str, Any], over: Any) -> None:
        self._fleet, self._over = fleet, over
        self._name = recorded["id"]
        self._system, self._system_blocks = system_prompt(recorded)
        self._blocks = 0
        self._running = 1
        self._go(list(_short(recorded["requests"])))

    def _go(self, requests: list[dict[str, Any]], answered: bool = False) -> None:
        """Send the first of a chain of requests, if one before it was `answered` after its pause, and then the rest."""
        while requests and requests[0]["type"] == "subagent":
            self._running += 1
            self._go(list(_short(requests[0]["requests"])))
            requests = requests[1:]
        if not requests:
            self._running -= 1
            return self._over() if not self._running else None
        first, rest = requests[0], requests[1:]
        pause = min(LONGEST_PAUSE, first.get("think_time", 0.0)) if answered else 0.0
        prompt = self._prompt(first)
        send = partial(self._fleet.ask, prompt, first["out"], lambda _whole: self._go(rest, answered=True))
        self._fleet.at(self._fleet.clock.now + pause, send)

    def _prompt(self, request: dict[str, Any]) -> np.ndarray:
        ids = block_numbers(request)
        parts = [_block(self._system if n < self._system_blocks else self._name, int(id)) for n, id in enumerate(ids)]
        return np.concatenate(parts)[: request["in"]]


def _short(requests: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for request in requests[:MAX_REQUESTS]:
        if request["type"] != "subagent":
            if request["in"] > LONGEST:
                return
            if not is_sent(request):
                continue
        yield request


_known: dict[tuple[str, int], np.ndarray] = {}


def _block(name: str, id: int) -> np.ndarray:
    if (found := _known.get((name, id))) is None:
        found = _known[name, id] = block_ids(name, id, 3, VOCAB)
    return found


def measure(sessions: list[dict[str, Any]], choice: str, at_once: int, cache: int, host: int) -> dict[str, float]:
    """Replay sessions."""
    briefly = choice == KEPT_BRIEFLY
    with simulated("radixrt" if briefly else choice) as clock, ExitStack() as patches:
        if briefly:
            patches.enter_context(patch.object(retention, "SECONDS", (5.0,)))
        fleet = Fleet(clock, 0, 0, 0 if choice == NO_HOST else host, cache, LONGEST + 40_000)
        left = deque(sessions)

        def begin() -> None:
            if left:
                Session(fleet, left.popleft(), begin)

        for number in range(at_once):
            fleet.at(number * LONGEST_PAUSE / at_once, begin)
        fleet.run()
    found = list(fleet.asked.values())
    return results(fleet) | {"session_s": sum(a.ended - a.begun for a in found) / len(sessions)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--sessions", type=int, default=96)
    parser.add_argument("--at-once", type=int, default=48)
    parser.add_argument("--cache", type=int, default=850_000, help="tokens on the device of each worker")
    parser.add_argument("--host", type=int, default=1_000_000, help="tokens in the host memory of each worker")
    parser.add_argument("--choices", default=",".join(CHOICES), help="comma-separated; not all: nothing is saved")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    sessions = read_blocks(args.data)[: args.sessions]
    rows = []
    for choice in args.choices.split(","):
        if choice in (NO_HOST, CONTEXTS_KEPT) and not args.host:
            continue
        rows.append({"choice": choice} | measure(sessions, choice, args.at_once, args.cache, args.host))
        print(rows[-1], flush=True)
    print(table(rows))
    if args.choices == ",".join(CHOICES):
        about = {"sessions": args.sessions, "at_once": args.at_once, "cache": args.cache, "host": args.host}
        save("replay" if args.host else "replay_no_host", rows, workers=WORKERS, **about)


if __name__ == "__main__":
    main()
