"""A worker alone on a CPU with a small GGUF model: scheduler and runner in one process, without router and HTTP.

    python -m bench.cpu FILE.gguf [--before FOLDER] [--threads N] [--rounds 5]

Tokens per second of prefill (prompts of 256 tokens) and of decode steps (median step of 24) for one and four requests,
in alternation: with weights as they are stored; dequantized at load (`--quantization none`), the reference, whose
greedy answers have to be the same; and by the code of another checkout of this repository (`--before`), by its
defaults, without drafts. Each is a process of its own. The machine's bandwidth is measured beside them, since a decode
step cannot be faster than the weights can be read.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from array import array
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROMPT, ANSWER = 256, 24
BATCHES = 1, 4


def measure(settings: dict[str, Any]) -> None:
    """The part of one process: load the model, then answer a line on stdin by a line of JSON with one round."""
    from radixrt.config import WorkerConfig, resolve
    from radixrt.worker.load.runner import load_runner

    runner = load_runner(resolve(WorkerConfig(device="cpu", max_total_tokens=8192, **settings)))
    print(json.dumps({"loaded": True}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({str(batch): one_round(runner, batch) for batch in BATCHES}), flush=True)


def one_round(runner: Any, batch: int) -> dict[str, Any]:
    from radixrt.messages import Run, Sampling
    from radixrt.worker.cache.page_cache import PageCache
    from radixrt.worker.request import Request
    from radixrt.worker.scheduler.scheduler import Limits, Scheduler

    cache = PageCache(runner.num_pages, runner.page_size, 8, 2048)
    scheduler = Scheduler(cache, Limits(2048, 8), None, False)
    runner.bind(cache.requests.table)
    sampling = Sampling(max_tokens=ANSWER + 2, temperature=0.0, ignore_eos=True)
    for number in range(batch):
        ids = array("i", ((7919 * (i + 1) * (number + 1)) % 5000 + 3 for i in range(PROMPT)))
        run = Run(id=number + 1, namespace="", ids=ids.tobytes(), prompt_len=PROMPT, sampling=sampling)
        scheduler.add(Request(run, PROMPT + ANSWER + 2, frozenset(), -1))
    seconds: list[float] = []
    tokens: dict[int, list[int]] = {}
    while True:
        began = time.perf_counter()
        scheduler.settle()
        if (plan := scheduler.plan()) is None:
            break
        for output in scheduler.apply(plan, runner.launch(plan)()):
            tokens.setdefault(output.id, []).extend(output.tokens)
        seconds.append(time.perf_counter() - began)
    steps = seconds[2:-1]
    return {
        "prefill": batch * PROMPT / seconds[0],
        "decode": batch / statistics.median(steps),
        "tokens": [tokens[number + 1] for number in range(batch)],
    }


class Subject:
    """A process that measures."""

    def __init__(self, tree: Path, settings: dict[str, Any]) -> None:
        self.rounds: list[dict[str, Any]] = []
        environment = os.environ | {"PYTHONPATH": str(tree), "OMP_WAIT_POLICY": "passive"}
        command = [sys.executable, str(Path(__file__)), "--measure", json.dumps(settings)]
        self._process = subprocess.Popen(
            command, env=environment, cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while not (line := self._process.stdout.readline()).startswith("{"):
            assert line, "the process has ended"
        found: dict[str, Any] = json.loads(line)
        return found

    def round(self) -> None:
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        self.rounds.append(self.answer())

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def bandwidth() -> float:
    """GB/s of reading 400 MB."""
    import torch

    large, best = torch.ones(100_000_000), 0.0
    for _ in range(5):
        began = time.perf_counter()
        large.sum()
        best = max(best, large.nbytes / (time.perf_counter() - began) / 1e9)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?")
    parser.add_argument("--before")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        return measure(json.loads(args.measure))
    from bench.common import save, table

    settings = {"model": str(Path(args.file).resolve()), "cpu_threads": args.threads}
    subjects = {"stored": Subject(ROOT, settings), "dequantized": Subject(ROOT, settings | {"quantization": "none"})}
    if args.before:
        subjects["before"] = Subject(Path(args.before).resolve(), settings)
    for subject in subjects.values():
        subject.answer()
    for _ in range(args.rounds):
        for subject in subjects.values():
            subject.round()
    for subject in subjects.values():
        subject.end()
    rows = []
    for batch in BATCHES:
        answers = [subject.rounds[0][str(batch)]["tokens"] for subject in subjects.values()]
        assert all(answer == answers[0] for answer in answers), "answers differ"
        for what in ("prefill", "decode"):
            row: dict[str, Any] = {"what": f"{what}, {batch} at once"}
            for name, subject in subjects.items():
                each = [found[str(batch)][what] for found in subject.rounds]
                row |= {name: statistics.median(each), f"{name} best": max(each)}
            rows.append(row)
    print(table(rows))
    name = Path(args.file).name
    save(f"cpu_{name.split('.')[0].lower()}", rows, model=name, unit="tokens/s", rounds=args.rounds, gb_s=bandwidth())


if __name__ == "__main__":
    main()
