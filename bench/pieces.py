"""Steps of new tokens whose kernels the host launches one by one, and by piecewise CUDA graphs.

    python -m bench.pieces [--shape llama-8b-awq] [--tokens N ...]

One prompt each, EACH of them one after the other, so that the host plans a step while the one before runs; random
weights in one of `bench.shapes`; both ways in turns, and the least of ROUNDS rounds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.common import save, table
from bench.shapes import SHAPES
from bench.worker import Bench
from radixrt.config import WorkerConfig, resolve
from radixrt.worker.cuda import loading, pieces
from radixrt.worker.loading import load_runner

EACH, ROUNDS = 8, 3


def step_ms(bench: Bench, tokens: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(EACH):
        bench.add(bench.ids(tokens), 1)
        bench.step()
    bench.finish()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / EACH * 1e3


def row(bench: Bench, tokens: int) -> dict[str, Any]:
    runner: Any = bench.worker.runner
    ways: dict[str, Any] = {"eager_ms": None, "graphs_ms": runner._pieces}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            runner._pieces = way
            found[name].append(step_ms(bench, tokens))
    return {"tokens": tokens} | {name: min(times) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-8b-awq", choices=SHAPES)
    parser.add_argument("--tokens", type=int, nargs="*", default=[520, 760, 1020, 1270, 1530, 2030])
    parser.add_argument("--attention-backend", default="triton")
    args = parser.parse_args()
    pieces.SIZES = tuple(sorted(args.tokens))
    loading.most_tokens = lambda *_: max(args.tokens)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES[args.shape]))
        config = WorkerConfig(
            model=folder, device="cuda", load_format="dummy", attention_backend=args.attention_backend,
            max_num_seqs=16, max_num_batched_tokens=max(args.tokens), max_total_tokens=32768,
        )  # fmt: skip
        runner = load_runner(resolve(config))
        bench = Bench(runner, 16, max(args.tokens), 32768)
        rows = []
        for tokens in args.tokens:
            rows.append(row(bench, tokens))
            print(rows[-1], flush=True)
        runner.close()
    print(table(rows))
    save(f"pieces_{args.shape.replace('-', '_')}", rows, device=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
