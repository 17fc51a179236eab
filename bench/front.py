"""CPU time of everything but the model, over HTTP and ZMQ: front end, router and a fake worker, all processes summed.

    python -m bench.front [--runs 5] [--quick]

A request has 4,096 token ids, half of which all requests share, and generates one token; 64 are in flight at a time,
and the caches are full and evict. Tokens are those of 64 and 128 streams of 400 tokens. The worker makes a step every
5 ms: 12,800 and 25,600 tokens per second. The client's CPU is not counted. The references, in the same run: a Starlette
StreamingResponse that yields the same bytes token by token, and a ZMQ relay that sends one message per token. Before
anything is timed, the streamed text is compared with the expected text, which is known for a fake worker.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bench.common import save, table
from bench.load import prompt_ids
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.demo.checkpoint import make_checkpoint
from radixrt.launch.launcher import Stack
from radixrt.process.ports import free_tcp_address
from radixrt.tokens import load_tokenizer
from radixrt.worker.execution.fake_runner import fake_token

STREAMS = 64, 128
TOKENS, PROMPT, VOCAB = 400, 64, 512
LONG = 4096
STEP = 0.005
REQUESTS, REQUEST, TOKEN = 2048, f"a request of {LONG} ids", "a streamed token"
CACHE = 1 << 19
"""Tokens in the worker's pool and in the report's infinite cache."""


class Load:
    """The process of the load generator (`bench.load`)."""

    def __init__(self, kind: str, address: str) -> None:
        command = [sys.executable, "-m", "bench.load", kind, address]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, **work: Any) -> dict[str, Any]:
        self._process.stdin.write(json.dumps(work | {"vocab": VOCAB}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def cpu_seconds(processes: dict[str, int]) -> dict[str, float]:
    """User plus system time so far, by role."""
    times = {role: psutil.Process(pid).cpu_times() for role, pid in processes.items()}
    return {role: t.user + t.system for role, t in times.items()}


@contextmanager
def stack(folder: Path) -> Iterator[tuple[str, str, dict[str, int]]]:
    """Run a router, a fake worker and a front end. Yields (HTTP address, ZMQ address, process ids by role)."""
    router = RouterConfig(model=str(folder), report_tokens=CACHE, client_address=free_tcp_address())
    worker = WorkerConfig(model=str(folder), fake=f"0,{STEP}", max_total_tokens=CACHE, max_num_batched_tokens=1 << 16)
    frontend = FrontendConfig(model=str(folder), port=int(free_tcp_address().rpartition(":")[2]))
    with Stack(StackConfig(resolve(router), worker, resolve(frontend))) as running:
        running.start()
        roles = {child.role: child.process.pid for child in running._subprocesses}
        yield f"http://127.0.0.1:{frontend.port}", router.client_address, roles


def expected_digest(folder: Path, streams: int) -> str:
    """The digest of the text of so many streams, computed from the fake worker's formula and the tokenizer."""
    tokenizer, texts = load_tokenizer(folder), []
    for number in range(streams):
        last, ids = int(prompt_ids(number, PROMPT, VOCAB)[-1]), []
        for position in range(PROMPT - 1, PROMPT - 1 + TOKENS):
            last = fake_token(last, position, tokenizer.model_vocab_size)
            ids.append(last)
        texts.append(tokenizer.decode(ids))
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def measure(load: Load, roles: dict[str, int], units: int, **work: Any) -> tuple[dict[str, Any], dict[str, float]]:
    """Run a load. Returns (the load generator's result, CPU microseconds per unit by role, with their sum)."""
    before = cpu_seconds(roles)
    seen = load.run(**work)
    time.sleep(0.05)
    spent = {role: (after - before[role]) / units * 1e6 for role, after in cpu_seconds(roles).items()}
    return seen, spent | {"sum": sum(spent.values())}


def measure_stack(folder: Path, scale: float) -> list[dict[str, Any]]:
    rows = []
    requests = max(2, int(REQUESTS * scale) // 64) * 64
    digests = {streams: expected_digest(folder, streams) for streams in STREAMS}
    with stack(folder) as (http, zmq, roles):
        for kind, address, text in (("http", http, True), ("zmq", zmq, True), ("zmq", zmq, False)):
            load = Load(kind, address)
            over = f"{kind}, text" if text else f"{kind}, ids only"
            try:
                for streams, digest in digests.items():
                    work = {"streams": streams, "tokens": TOKENS, "prompt": PROMPT, "text": text}
                    warm = load.run(**work)
                    assert not text or warm["digest"] == digest, "the text is not what the worker generated"
                    seen, token = measure(load, roles, streams * TOKENS, **work)
                    assert not text or seen["digest"] == digest
                    rows.append({"what": TOKEN, "of": streams, "over": over} | token | {"seconds": seen["seconds"]})
            finally:
                load.close()
    with stack(folder) as (http, zmq, roles):
        for kind, address in (("http", http), ("zmq", zmq)):
            load = Load(kind, address)
            try:
                work = {"requests": requests, "concurrency": 64, "tokens": 1, "prompt": LONG, "text": False}
                load.run(**work | {"requests": 448, "first": 10**6})
                seen, request = measure(load, roles, requests, **work)
                assert seen.get("requests", requests) == requests
                rows.append({"what": REQUEST, "over": kind} | request | {"seconds": seen["seconds"]})
            finally:
                load.close()
    return rows


def measure_references() -> list[dict[str, Any]]:
    rows = []
    for kind in ("http", "zmq"):
        address = free_tcp_address()
        shown = address.replace("tcp", "http") if kind == "http" else address
        process = subprocess.Popen([sys.executable, "-m", "bench.plain_front", kind, address], stdout=subprocess.PIPE)
        process.stdout.readline()
        load = Load(kind, shown)
        try:
            what = "Starlette StreamingResponse" if kind == "http" else "relay, a message a token"
            for streams in STREAMS:
                work = {"streams": streams, "tokens": TOKENS, "prompt": PROMPT, "text": False}
                load.run(**work)
                seen, token = measure(load, {"plain": process.pid}, streams * TOKENS, **work)
                row = {"what": TOKEN, "of": streams, "over": f"{kind}: {what}"}
                rows.append(row | token | {"seconds": seen["seconds"]})
            if kind == "http":
                work = {"requests": REQUESTS, "concurrency": 64, "tokens": 1, "prompt": LONG}
                seen, request = measure(load, {"plain": process.pid}, REQUESTS, **work)
                over = "http: Starlette, JSON read and written"
                rows.append({"what": REQUEST, "over": over} | request | {"seconds": seen["seconds"]})
        finally:
            load.close()
            process.terminate()
            process.wait()
            process.stdout.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer requests, to see that it runs")
    parser.add_argument("--runs", type=int, default=1, help="runs of all, of which the medians are shown")
    args = parser.parse_args()
    runs = []
    for _ in range(args.runs):
        with tempfile.TemporaryDirectory() as folder:
            make_checkpoint(Path(folder))
            rows = measure_stack(Path(folder), 0.1 if args.quick else 1.0)
        runs.append(rows + measure_references())
    rows = [medians(row) for row in zip(*runs, strict=True)]
    print("microseconds of CPU, by process\n", table(rows), sep="\n")
    if not args.quick:
        save("front", rows, tokens=TOKENS, unit="us of CPU", runs=args.runs)


def medians(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row of several runs: the median of each figure, and the least and the largest sum."""
    found = {name: median(row[name] for row in rows) for name, one in rows[0].items() if isinstance(one, float)}
    sums = [row["sum"] for row in rows]
    return rows[0] | found | ({"least": min(sums), "most": max(sums)} if len(rows) > 1 else {})


if __name__ == "__main__":
    main()
