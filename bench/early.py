"""The gain of launching kernels before their predecessors have ended (`cuda.launching`): steps without and with it, in
one process; both must sample the same tokens.

    python -m bench.early [SHAPE[:quantization=fp8] ...]
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.common import save, table
from bench.shapes import SHAPES
from bench.worker import STEPS, Bench
from radixrt.config import WorkerConfig, resolve
from radixrt.worker.cuda.elementwise import launching
from radixrt.worker.load.runner import load_runner

ALL = ("llama-8b", "llama-8b:quantization=fp8", "qwen3-30b", "deepseek-v2-lite", "gpt-oss-20b")
BATCHES = (1, 16, 64)
TURNS = {"plain_ms": lambda: False, "early_ms": launching.launches_early}


def steps_ms(bench: Bench, batch: int) -> tuple[float, list[Any]]:
    """Run steps of `batch` decodes. Returns (milliseconds per step, sorted (request, tokens))."""
    bench._rng = np.random.default_rng(0)
    for _ in range(batch):
        bench.add(bench.ids(1024), 2 * STEPS)
    bench.settle()
    for _ in range(8):
        bench.step()
    drawn: list[Any] = []
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        outputs = bench.worker._step()
        bench.worker._reply(outputs)
        drawn += [(output.id - bench._next, *output.tokens) for output in outputs]
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    bench.finish()
    return seconds / STEPS * 1e3, sorted(drawn)


def hit_ms(bench: Bench) -> float:
    """Median milliseconds for 128 new tokens after 16,384 cached ones."""
    times = []
    for _ in range(6):
        prefix = bench.ids(16384)
        bench.add(prefix, 1)
        bench.finish()
        prompt = np.concatenate([prefix, bench.ids(128)])
        torch.cuda.synchronize()
        began = time.perf_counter()
        bench.add(prompt, 1)
        bench.finish()
        times.append(time.perf_counter() - began)
    return float(np.median(times[1:])) * 1e3


def rows_of(what: str) -> list[dict[str, Any]]:
    shape, *options = what.split(":")
    rows: dict[str, dict[str, Any]] = {}
    drawn: dict[int, list[list[Any]]] = {batch: [] for batch in BATCHES}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES[shape]))
        config = WorkerConfig(model=folder, device="cuda", load_format="dummy", max_num_seqs=max(BATCHES))
        config = resolve(replace(config, attention_backend="triton", **dict(o.split("=") for o in options)))
        for name, early in TURNS.items():
            launching.launches_early = early
            runner = load_runner(config)
            bench = Bench(runner, max(BATCHES), 8192, 32768)
            for batch in BATCHES:
                ms, tokens = steps_ms(bench, batch)
                rows.setdefault(f"{what}, {batch} decodes with 1,024 tokens", {})[name] = ms
                drawn[batch].append(tokens)
            rows.setdefault(f"{what}, 128 new tokens on 16,384", {})[name] = hit_ms(bench)
            runner.close()
            del runner, bench
            gc.collect()
            torch.cuda.empty_cache()
    assert all(plain == early for plain, early in drawn.values()), "tokens differ"
    return [{"what": name, **row, "ratio": row["early_ms"] / row["plain_ms"]} for name, row in rows.items()]


def main(shapes: list[str]) -> None:
    rows = []
    for what in shapes or ALL:
        rows += rows_of(what)
        print(table(rows), flush=True)
    save("early", rows, device=torch.cuda.get_device_name())


if __name__ == "__main__":
    main(sys.argv[1:])
