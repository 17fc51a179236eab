"""What radixrt does to KV pages and to weights, judged by answers:  python -m training.nano.quality

The same items with pages of every dtype, FP8 with scale 1 and calibrated, with chunks of several sizes, and on a GPU
with tree attention on and off and with products in FP8; each cold, then once more with all prompts cached. Each row is
compared with bfloat16 pages, cold, item by item: how many became right, how many wrong, and how likely so uneven a
split is by chance (McNemar's exact test). The surprise, -log p of what is said in nats a token, shows what is too
little to change an answer. On a GPU two of the tasks have longer contexts than the model was trained with, so that not
all is easy. JSON goes to bench/results/nano_quality.json as the rows come.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.common import RESULTS, machine, table
from radixrt.config import gpu_count
from training.nano.eval import MAX_ITEMS
from training.nano.score import Share, sign_test
from training.nano.solve import Outcome, serve
from training.nano.tasks import TAGS, Example, make

CPU_TASKS = ("recall/256", "recall/1024", "recall_several/512", "tools/3", "arithmetic/2", "lookup/2", "json/4")
GPU_TASKS = (
    "recall/512", "recall/2048", "recall/4096", "recall/6000", "recall_several/1024", "recall_several/4096",
    "recall_several/6000", "tools/3", "tools/two", "arithmetic/2", "arithmetic/4", "lookup/2", "json/4",
    "choose/recall",
)  # fmt: skip
REFERENCE = "bfloat16"
PASSES = ("cold", "warm")


@dataclass(frozen=True, slots=True)
class Setting:
    """worker: fields of WorkerConfig. copies: of each item, asked at the same time, so that they share what they read;
    the first one counts."""

    name: str
    worker: dict[str, Any]
    copies: int = 1
    gpu_only: bool = False


BF16: dict[str, Any] = {"kv_cache_dtype": "bfloat16"}
E4M3: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3"}
SETTINGS = (
    Setting(REFERENCE, BF16),
    Setting("float32", {"kv_cache_dtype": "float32", "dtype": "float32"}),
    Setting("e4m3, scale 1", {**E4M3, "kv_scales": "none"}),
    Setting("e4m3, calibrated", E4M3),
    Setting("e5m2, scale 1", {"kv_cache_dtype": "fp8_e5m2", "kv_scales": "none"}),
    Setting("e5m2, calibrated", {"kv_cache_dtype": "fp8_e5m2"}),
    *(Setting(f"chunks of {size}", {**BF16, "max_num_batched_tokens": size}) for size in (64, 512, 8192)),
    Setting("tree attention off", {**BF16, "tree_attention": "off"}, 4, gpu_only=True),
    Setting("tree attention on", {**BF16, "tree_attention": "on"}, 4, gpu_only=True),
    Setting("e4m3, tree off", {**E4M3, "tree_attention": "off"}, 4, gpu_only=True),
    Setting("e4m3, tree on", {**E4M3, "tree_attention": "on"}, 4, gpu_only=True),
    Setting("products in FP8", {**BF16, "quantization": "fp8"}, gpu_only=True),
    Setting("products in FP8, e4m3", {**E4M3, "quantization": "fp8"}, gpu_only=True),
)


@dataclass(slots=True)
class Result:
    """One pass of a setting. right: of each item. cached: share of the prompts' tokens. surprise: nats a token said."""

    setting: str
    pass_name: str
    right: list[bool] = field(default_factory=list)
    cached: float = 0.0
    surprise: float = 0.0
    seconds: float = 0.0
    error: str = ""


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="training.nano.quality", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [setting.name for setting in SETTINGS]
    parser.add_argument("--model", default="nano")
    parser.add_argument("--device", default="auto", help="cpu or cuda")
    parser.add_argument("--settings", nargs="+", metavar="NAME", choices=names, default=names, help=", ".join(names))
    parser.add_argument("--tasks", nargs="+", metavar="KIND/TAG", help="default: fewer on a CPU")
    parser.add_argument(
        "--items", type=int, help=f"of each task, at most {MAX_ITEMS} (default: 40 on a GPU, 4 on a CPU)"
    )
    parser.add_argument("--concurrency", type=int, help="items at once (default: 64 on a GPU, 8 on a CPU)")
    parser.add_argument("--jobs", type=int, help="settings at once, each in a process (default: 6 on a GPU, else 1)")
    parser.add_argument("--json", type=Path, default=RESULTS / "nano_quality.json", metavar="FILE")
    args = parser.parse_args(given)
    args.device = ("cuda" if gpu_count() else "cpu") if args.device == "auto" else args.device
    on_gpu = args.device != "cpu"
    args.tasks = args.tasks or list(GPU_TASKS if on_gpu else CPU_TASKS)
    args.items = args.items or (40 if on_gpu else 4)
    args.concurrency = args.concurrency or (64 if on_gpu else 8)
    args.jobs = args.jobs or (6 if on_gpu else 1)
    if args.items > MAX_ITEMS:
        parser.error(f"--items: from 1 to {MAX_ITEMS}")
    for task in args.tasks:
        kind, _, tag = task.partition("/")
        of_any_length = kind.startswith("recall") and tag.isdigit()
        if tag not in TAGS.get(kind, ()) and not (kind in TAGS and of_any_length):
            parser.error(f"--tasks: no {task}")
    return args


def examples_of(tasks: Sequence[str], items: int) -> list[Example]:
    return [make(*task.split("/"), seed) for task in tasks for seed in range(items)]


# ---------------------------------------------------------------- runs


def run(setting: Setting, model: str, device: str, tasks: Sequence[str], items: int, concurrency: int) -> list[Result]:
    """Both passes on a worker of its own."""
    examples = [example for example in examples_of(tasks, items) for _ in range(setting.copies)]
    room = 1 << (20 if device != "cpu" else 17)
    results = []
    try:
        with serve(model, device=device, max_total_tokens=room, **setting.worker) as served:
            endpoint = replace(served, logprobs=True)
            for name in PASSES:
                began = time.perf_counter()
                outcomes = asyncio.run(endpoint.solve_all(examples, concurrency * setting.copies))
                results.append(_result(setting, name, outcomes, time.perf_counter() - began))
    except Exception as problem:  # this machine cannot serve it so: the other rows come all the same
        return [Result(setting.name, name, error=f"{type(problem).__name__}: {problem}"[:300]) for name in PASSES]
    return results


def _result(setting: Setting, name: str, outcomes: list[Outcome], seconds: float) -> Result:
    prompt = sum(outcome.prompt_tokens for outcome in outcomes)
    cached = sum(outcome.cached_tokens for outcome in outcomes)
    right = [outcome.right for outcome in outcomes[:: setting.copies]]
    surprise = sum(outcome.surprise for outcome in outcomes) / sum(outcome.said_tokens for outcome in outcomes)
    return Result(setting.name, name, right, cached / prompt, surprise, seconds)


# ---------------------------------------------------------------- rows


def rows_of(results: Sequence[Result], tasks: Sequence[str], items: int) -> list[dict[str, Any]]:
    """In the order of SETTINGS, each beside the reference, if it is there."""
    order = {setting.name: i for i, setting in enumerate(SETTINGS)}
    reference = next((r.right for r in results if r.setting == REFERENCE and r.pass_name == "cold"), [])
    found = sorted(results, key=lambda r: (order[r.setting], PASSES.index(r.pass_name)))
    return [_row(result, reference, tasks, items) for result in found]


def _row(result: Result, reference: Sequence[bool], tasks: Sequence[str], items: int) -> dict[str, Any]:
    row: dict[str, Any] = {"setting": result.setting, "pass": result.pass_name}
    if result.error:
        return row | {"error": result.error}
    share = Share(sum(result.right), len(result.right))
    low, high = share.interval()
    row |= {"items": share.items, "right": share.right, "accuracy": round(share.value, 4)}
    row |= {"low": round(low, 4), "high": round(high, 4)}
    if reference:
        better = sum(now and not before for now, before in zip(result.right, reference, strict=True))
        worse = sum(before and not now for now, before in zip(result.right, reference, strict=True))
        row |= {"better": better, "worse": worse, "p": round(sign_test(better, worse), 4)}
    row |= {"surprise": float(f"{result.surprise:.4g}"), "cached": round(result.cached, 4)}
    row |= {"seconds": round(result.seconds, 1)}
    by_task = {task: sum(result.right[i * items : (i + 1) * items]) for i, task in enumerate(tasks)}
    return row | {"by_task": by_task}


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row as a line of the table."""
    line = {"pages": f"{row['setting']}, {row['pass']}"}
    if "error" in row:
        return line | {"right, % (95%)": row["error"][:60]}
    line |= {"items": row["items"], "right, % (95%)": Share(row["right"], row["items"]).shown}
    line |= {"better": row.get("better", ""), "worse": row.get("worse", ""), "p": row.get("p", "")}
    line |= {"nats / 1,000 tokens": f"{1000 * row['surprise']:.3g}"}
    return line | {"cached": f"{row['cached']:.1%}", "s": row["seconds"]}


def main(given: Sequence[str] | None = None) -> int:
    args = arguments(given)
    on_gpu = args.device != "cpu"
    settings = [s for s in SETTINGS if s.name in args.settings and (on_gpu or not s.gpu_only)]
    facts = {"model": args.model, "device": args.device, "tasks": args.tasks, "items_a_task": args.items}
    results: list[Result] = []
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    # Processes: threads of one would share an interpreter. Spawned: CUDA cannot be forked.
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        job = (args.model, args.device, args.tasks, args.items, args.concurrency)
        for done in as_completed([pool.submit(run, setting, *job) for setting in settings]):
            results += done.result()
            rows = rows_of(results, args.tasks, args.items)
            content = {"benchmark": "nano_quality", "machine": machine(), **facts, "rows": rows}
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(content, indent=1) + "\n")
            last = rows_of(done.result(), args.tasks, args.items)
            print(f"{time.perf_counter() - began:6.1f} s", *(shown(row) for row in last), sep="\n  ", file=sys.stderr)
    print(table([shown(row) for row in rows]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
