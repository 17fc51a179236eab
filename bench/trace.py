"""Where the time of single steps goes, by kernel: a worker alone on a GPU, as in `bench.worker`.

    python -m bench.trace [--shape qwen3-30b] [--steps 1x1024,600+8192]

`BxC` is a step of B decodes with C tokens each, `N+C` a step of N new tokens on C cached ones. Kernels overlap where
they are launched early; a moment counts for the kernel that began first, so that the kernels' times, plus the gaps
before them in which no kernel ran, are the duration of the step. Prints the kernels by their share, and in order those
of one layer in the middle of the model.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench.shapes import SHAPES
from bench.worker import Bench
from radixrt.config import WorkerConfig, resolve
from radixrt.worker.load.runner import load_runner

NAME, SHOWN, RUNS = 44, 12, 3


@dataclass(frozen=True, slots=True)
class Ran:
    """A kernel that ran: its own time and the gap before it, µs."""

    name: str
    us: float
    gap: float


def traced(run: Callable[[], object]) -> list[Ran]:
    """The kernels of a run, in the order in which they began."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    events = [event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    found, last = [], events[0].time_range.start
    for event in events:
        begin, end = event.time_range.start, event.time_range.end
        found.append(Ran(shortened(event.name), max(0.0, end - max(begin, last)), max(0.0, begin - last)))
        last = max(last, end)
    return found


def shortened(name: str) -> str:
    """The name of a kernel without types and namespaces."""
    name = re.sub(r"^void |at::native::|\(anonymous namespace\)::|cutlass::|std::", "", name)
    return name[:NAME]


def show(what: str, wall_ms: float, kernels: list[Ran], runs: int, layers: int) -> None:
    """Print the kernels of `runs` equal steps."""
    busy, gaps = sum(k.us for k in kernels) / runs, sum(k.gap for k in kernels) / runs
    print(f"\n== {what}: {wall_ms:.3f} ms; traced: kernels {busy:.0f} us, gaps {gaps:.0f} us, "
          f"{len(kernels) / runs:.0f} launches", flush=True)  # fmt: skip
    by_name: dict[str, list[Ran]] = {}
    for kernel in kernels:
        by_name.setdefault(kernel.name, []).append(kernel)
    ranked = sorted(by_name.items(), key=lambda item: -sum(k.us + k.gap for k in item[1]))
    for name, own in ranked[:SHOWN]:
        us, gap = (sum(getattr(k, field) for k in own) / runs for field in ("us", "gap"))
        print(f"{us:9.1f} +{gap:7.1f} us  {len(own) / runs:5.0f} x {us / len(own) * runs:8.2f}  {name}")
    of_layer = next((name for name, own in ranked if len(own) in (runs * layers, runs * (layers - 1))), None)
    if of_layer is not None:
        at = [i for i, k in enumerate(kernels) if k.name == of_layer]
        middle = len(at) // runs // 2  # of the first run
        begin, end = at[middle - 1], at[middle]
        print("a layer: " + " | ".join(f"{k.name[:20]} {k.us:.1f}+{k.gap:.1f}" for k in kernels[begin:end]))


def decodes(bench: Bench, batch: int, context: int, layers: int) -> None:
    for _ in range(batch):
        bench.add(bench.ids(context), 96)
    bench.settle()
    for _ in range(8):
        bench.step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(32):
        bench.step()
    wall = (time.perf_counter() - began) / 32 * 1e3
    kernels = traced(lambda: [bench.step() for _ in range(2 * RUNS)])
    bench.finish()
    show(f"{batch} decodes with {context}", wall, kernels, 2 * RUNS, layers)


def prefill(bench: Bench, new: int, cached: int, layers: int) -> None:
    prefix = bench.ids(cached)
    if cached:
        bench.add(prefix, 1)
        bench.finish()

    def one() -> float:
        prompt = np.concatenate([prefix, bench.ids(new)])
        torch.cuda.synchronize()
        began = time.perf_counter()
        bench.add(prompt, 1)
        bench.finish()
        return time.perf_counter() - began

    wall = float(np.median([one() for _ in range(6)][1:])) * 1e3
    kernels = traced(lambda: [one() for _ in range(RUNS)])
    show(f"{new} new on {cached}", wall, kernels, RUNS, layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b", choices=SHAPES)
    parser.add_argument("--steps", default="1x1024,64x1024,128+16384,600+8192,8192+0")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--quantization", default="auto", choices=("auto", "fp8", "none"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES[args.shape]))
        settings = {"quantization": args.quantization, "attention_backend": args.attention_backend}
        worker = resolve(WorkerConfig(model=folder, device="cuda", load_format="dummy", **settings))
        runner = load_runner(worker)
        bench = Bench(runner, worker.max_num_seqs, worker.max_num_batched_tokens, 32768)
        layers = SHAPES[args.shape]["num_hidden_layers"]
        for step in args.steps.split(","):
            way, sign = (decodes, "x") if "x" in step else (prefill, "+")
            first, second = map(int, step.split(sign))
            way(bench, first, second, layers)
        runner.close()


if __name__ == "__main__":
    main()
