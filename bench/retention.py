"""What one worker's cache hits, by its order of eviction: recorded traces, blocks of 512 tokens, no host memory.

    python -m bench.retention [--data FOLDER] [--quick]

Sessions of coding agents (`kv_cache_tester`) begin at PER_MINUTE; where a session pauses longer than LONGEST_PAUSE, it
pauses so long. A conversation trace (`mooncake`) is as recorded. A request's hit is its longest prefix that is cached
when it arrives; then all its whole blocks are cached, and nothing of its answer. Rows: least recently used; Belady's
optimum, which evicts what is used again last; and the tree of a worker with the order that it learns (`returns`). Of a
request the order knows when it arrives, and after the recorded time why it ended and how many tokens it generated.
Nothing leases blocks while a request runs: so it is for the optimum. The halves are every other session.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import save, table
from radixrt.tree import RadixTree
from radixrt.worker.cache.return_order import ReturnOrder

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
BLOCK, PARTS = 512, 8
"""Tokens of a block, and recorded blocks of a session in one."""
PER_MINUTE = 1.0
LONGEST_PAUSE = 600.0
ANSWER_SECONDS, TOKEN_SECONDS = 8.0, 0.02
"""Time of an answer whose time was not recorded: of a session's, and per token of a conversation's."""
AGENT_BLOCKS, CHAT_BLOCKS = (1_000, 3_000, 5_000), 10_000
NAMESPACE = "tenant"


@dataclass(frozen=True, slots=True)
class Request:
    """Arrives at `time`; `path` are its blocks, int32, of which each names all before it; it ends after `seconds`."""

    time: float
    path: np.ndarray
    tokens: int
    generated: int
    why: str
    seconds: float


def agents(data: Path, half: int | None, per_minute: float, seed: int | None) -> list[Request]:
    """Requests of all sessions, or of one half, in order of time. With a seed the sessions are shuffled, and begin at
    random times."""
    with gzip.open(data / "kv_cache_tester" / "sessions.jsonl.gz", "rt") as file:
        sessions = [json.loads(line) for line in file.read().split("\n") if line]
    sessions = sessions if half is None else sessions[half::2]
    rng = random.Random(seed)
    if seed is not None:
        rng.shuffle(sessions)
    numbers: dict[tuple[int, int], int] = {}
    found, start = [], 0.0
    for session, recorded in enumerate(sessions):
        now, last = start, 0.0
        for request in sorted(_calls(recorded["requests"]), key=lambda one: float(one["t"])):
            now, last = now + min(LONGEST_PAUSE, request["t"] - last), request["t"]
            ids = np.concatenate([np.arange(0), *(np.arange(at, at + n) for at, n in request["hash_runs"])])
            blocks = ids[PARTS - 1 :: PARTS].tolist()
            path = np.array([numbers.setdefault((session, one), len(numbers)) for one in blocks], np.int32)
            seconds = request.get("api_time") or ANSWER_SECONDS
            found.append(Request(now, path, request["in"], request["out"], request["stop"] or "stop", seconds))
        start += 60 / per_minute if seed is None else rng.expovariate(per_minute / 60)
    return sorted(found, key=lambda one: one.time)


def _calls(requests: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for request in requests:
        yield from request["requests"] if request["type"] == "subagent" else [request]


def chats(data: Path) -> list[Request]:
    with gzip.open(data / "mooncake" / "conversation_trace.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file.read().split("\n") if line]
    return [
        Request(
            row["timestamp"] / 1000, np.array(row["hash_ids"], np.int32), row["input_length"], row["output_length"],
            "stop", TOKEN_SECONDS * row["output_length"],
        )
        for row in rows
    ]  # fmt: skip


def tree_hits(requests: list[Request], blocks: int, learns: bool) -> tuple[float, float]:
    """Shares of tokens and of blocks that the tree of a cache hits."""
    tree = RadixTree(values=False)
    order = ReturnOrder([tree], blocks, grain=1) if learns else None
    ending: list[tuple[float, int]] = []
    hits = []
    for number, request in enumerate(requests):
        if order is not None:
            while ending and ending[0][0] <= request.time:
                end, which = heapq.heappop(ending)
                one = requests[which]
                order.ended(which, NAMESPACE, one.path, one.why, one.generated, end)
            order.arrived(number, NAMESPACE, request.path, request.time)
            heapq.heappush(ending, (request.time + request.seconds, number))
        hits.append(tree.match(NAMESPACE, request.path).length)
        tree.insert(NAMESPACE, request.path)
        if order is not None:
            order.released(number, NAMESPACE, request.path)
        if tree.tokens > blocks:
            if order is not None:
                order.before_eviction(request.time)
            tree.evict(tree.tokens - blocks)
    tree.check()
    return shares(requests, hits)


def best_hits(requests: list[Request], blocks: int) -> tuple[float, float]:
    """Belady's: of all blocks, the one whose next use is last is evicted first; of equal ones, the deepest."""
    coming: dict[int, int] = {}
    uses: list[list[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        path = requests[number].path.tolist()
        uses.append([coming.get(block, len(requests)) for block in path])
        coming.update(dict.fromkeys(path, number))
    held: dict[int, int] = {}
    last: list[tuple[int, int, int]] = []
    hits = []
    for request, following in zip(requests, reversed(uses), strict=True):
        path = request.path.tolist()
        hits.append(next((at for at, block in enumerate(path) if block not in held), len(path)))
        for depth, (block, use) in enumerate(zip(path, following, strict=True)):
            held[block] = use
            heapq.heappush(last, (-use, -depth, block))
        while len(held) > blocks:
            use, _, block = heapq.heappop(last)
            if held.get(block) == -use:
                del held[block]
    return shares(requests, hits)


def shares(requests: list[Request], hits: list[int]) -> tuple[float, float]:
    tokens = sum(min(BLOCK * hit, request.tokens) for hit, request in zip(hits, requests, strict=True))
    return tokens / sum(one.tokens for one in requests), sum(hits) / sum(len(one.path) for one in requests)


def measure(name: str, requests: list[Request], blocks: int) -> dict[str, Any]:
    lru, returns = (tree_hits(requests, blocks, learns) for learns in (False, True))
    best = best_hits(requests, blocks)
    infinite = tree_hits(requests, 1 << 30, learns=False)
    row = {"trace": name, "blocks": blocks, "lru": lru[0], "returns": returns[0], "belady": best[0]}
    row |= {"infinite": infinite[0], "gap_closed": (returns[0] - lru[0]) / (best[0] - lru[0])}
    return row | {"lru_blocks": lru[1], "returns_blocks": returns[1], "belady_blocks": best[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--quick", action="store_true", help="one small case, to see that it runs")
    args = parser.parse_args()
    cases: list[tuple[str, list[Request], int]] = []
    if args.quick:
        cases.append(("conversations", chats(args.data)[:1000], 1_000))
    else:
        traces = {"agents": agents(args.data, None, PER_MINUTE, None)}
        for half in (0, 1):
            traces[f"agents, half {half}"] = agents(args.data, half, PER_MINUTE, None)
        traces["agents, shuffled"] = agents(args.data, None, PER_MINUTE, 1)
        traces["agents, 2 a minute"] = agents(args.data, None, 2.0, None)
        cases += [(name, requests, blocks) for name, requests in traces.items() for blocks in AGENT_BLOCKS]
        cases += [("conversations", chats(args.data), blocks) for blocks in (3_000, CHAT_BLOCKS, 30_000)]
    rows = []
    for case in cases:
        rows.append(measure(*case))
        print(rows[-1], flush=True)
    print(table(rows))
    if not args.quick:
        save("retention", rows, per_minute=PER_MINUTE, longest_pause=LONGEST_PAUSE, block=BLOCK)


if __name__ == "__main__":
    main()
