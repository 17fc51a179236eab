"""Durations of a worker's steps under the loads of `bench.serve`, without router and HTTP.

    python -m bench.steps [--loads sessions,tot] [--quick]

Steps are grouped by their number of new prompt tokens. Random weights in the shape of Llama 3.1 8B.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.common import save, table
from bench.serve.loads import Ask, Load, make_load, segment_ids
from bench.shapes import LLAMA_8B
from bench.worker import Bench
from radixrt.config import WorkerConfig, resolve
from radixrt.worker.load.runner import load_runner
from radixrt.worker.plan import Plan, Result, Runner

KINDS = {
    "decodes alone": (0, 1),
    "and < 2k of prompts": (1, 2048),
    "and 2k to 6k": (2048, 6144),
    "and more": (6144, 1 << 30),
}


class Watch:
    """Records the steps of a runner: (decodes, chunks, tokens of chunks, seconds on the GPU, seconds of the launch)."""

    def __init__(self, runner: Runner) -> None:
        self.steps: list[tuple[float, ...]] = []
        self._runner, self._launch = runner, runner.launch
        runner.launch = self.launch  # type: ignore[method-assign]

    def launch(self, plan: Plan) -> Callable[[], Result]:
        began = time.perf_counter()
        wait = self._launch(plan)
        chunk = plan.counts > 1
        note = (int((~chunk).sum()), int(chunk.sum()), int(plan.counts[chunk].sum()))
        launching = time.perf_counter() - began

        def waited() -> Result:
            before = self._runner.busy_seconds
            result = wait()
            self.steps.append((*note, self._runner.busy_seconds - before, launching))
            return result

        return waited

    def rows(self, name: str) -> list[dict[str, Any]]:
        steps = np.array(self.steps)
        found = []
        for kind, (low, high) in KINDS.items():
            part = steps[(steps[:, 2] >= low) & (steps[:, 2] < high)]
            if len(part):
                decodes, chunks, tokens, seconds, launching = part.mean(0).tolist()
                row = {"what": f"{name}: {kind}", "steps": len(part), "seconds": part[:, 3].sum(), "ms": seconds * 1e3}
                more = {"decodes": decodes, "chunks": chunks, "new_tokens": tokens, "launch_ms": launching * 1e3}
                found.append(row | more)
        return found


def run(bench: Bench, load: Load, repetition: int) -> tuple[int, float]:
    """Run a load; a request starts when the one that it waits for has ended. Returns (generated tokens, seconds)."""
    vocab = bench.worker.runner.vocab_size
    parts: dict[int, np.ndarray] = {}

    def ids(ask: Ask) -> np.ndarray:
        for part in ask.parts:
            if part not in parts:
                size = load.segments[part]
                parts[part] = segment_ids(load.name, part, size, seed=0, repetition=repetition, vocab_size=vocab)
        return np.concatenate([parts[part] for part in ask.parts])

    for ask in load.prepare:
        bench.add(ids(ask), ask.max_tokens)
        bench.finish()
    prompts = [ids(ask) for ask in load.asks]
    after: dict[int | None, list[int]] = defaultdict(list)
    for number, ask in enumerate(load.asks):
        after[ask.after].append(number)
    asked: dict[int, int] = {}

    def start(numbers: list[int]) -> None:
        for number in numbers:
            asked[bench.add(prompts[number], load.asks[number].max_tokens)] = number

    worker, tokens, began = bench.worker, 0, time.perf_counter()
    start(after[None])
    while worker.scheduler.has_work or worker._inflight:
        outputs = worker._step()
        worker._reply(outputs)
        for output in outputs:
            tokens += len(output.tokens)
            if output.finish:
                start(after[asked[output.id]])
    return tokens, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", default="sessions,tot")
    parser.add_argument(
        "--quick", action="store_true", help="a small model and little of each load, to see that it runs"
    )
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        config = LLAMA_8B | ({"num_hidden_layers": 2} if args.quick else {})
        Path(folder, "config.json").write_text(json.dumps(config))
        worker = resolve(WorkerConfig(model=folder, device="cuda", load_format="dummy"))
        runner = load_runner(worker)
        bench, watch = Bench(runner, worker.max_num_seqs, worker.max_num_batched_tokens, 32768), Watch(runner)
        for name in args.loads.split(","):
            load = make_load(name, 0.1 if args.quick else 1.0)
            for repetition in range(2):  # the first one warms up
                watch.steps.clear()
                tokens, seconds = run(bench, load, repetition)
            rows.append({"what": name, "tokens_s": tokens / seconds, "seconds": seconds, "steps": len(watch.steps)})
            rows += watch.rows(name)
            print(table(rows), flush=True)
    if not args.quick:
        save("steps", rows, device=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
