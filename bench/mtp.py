"""Drafts of a model's multi-token prediction layer, on a worker alone on a GPU, as in `bench.worker`.

    python -m bench.mtp [--shape glm-4.7-flash] [--kv-cache-dtype fp8_e4m3] [--quantization fp8] [--quick]

Random weights, whose layer predicts nothing: the steps are timed whose proposals are drafted, "k proposed", and are all
wrong. If a proposal is right with probability a when those before it are, then a step gives 1 + a + ... + a^k tokens.
From that follow, computed, the probability from which on drafting gains ("even_at"), and tokens per second relative to
those without drafts if it is 0.8 ("times_at_80"). "served" is the real drafter, which has to find out that the
proposals are useless.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.common import save, table
from bench.shapes import SHAPES
from bench.worker import Bench
from radixrt.config import WorkerConfig, resolve
from radixrt.worker.load.runner import load_runner
from radixrt.worker.request import Request
from radixrt.worker.speculative.mtp_cost import expected
from radixrt.worker.speculative.ngram import Drafter

PROMPT, TOKENS = 1024, 192


class Always(Drafter):
    """Drafts all proposals, `size` tokens, and nothing that is looked up."""

    def __init__(self, size: int) -> None:
        super().__init__(size, overlaps=True, predicts=True)

    def proposes(self, requests: Sequence[Request]) -> int:
        return self.most

    def begins(self, request: Request, requests: int) -> bool:
        return request.total + 2 <= request.limit

    def draft(self, request: Request, most: int, requests: int) -> list[int]:
        own = self._draft_state(request).proposals
        count = min(most, request.limit - len(request.tokens) - 1)
        return own.ids[:count] if own.length == len(request.tokens) else []


def even_at(ratio: float, count: int) -> float:
    """The acceptance a for which 1 + a + ... + a^count is `ratio`; above 1 there is none."""
    low, high = 0.0, 2.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 + expected(middle, count) < ratio else (low, middle)
    return high


def measured(bench: Bench, prompts: list[Any], drafter: Drafter | None) -> dict[str, Any]:
    scheduler = bench.worker.scheduler
    scheduler.drafter = drafter
    for ids in prompts:
        bench.add(ids, TOKENS)
    bench.settle()
    torch.cuda.synchronize()
    steps, began = scheduler.steps, time.perf_counter()
    tokens = bench.finish()
    seconds, steps = time.perf_counter() - began, scheduler.steps - steps
    row = {"ms": seconds / steps * 1e3, "tokens_s": tokens / seconds}
    if drafter is not None:
        row |= {"drafted": drafter.drafted / tokens, "right": drafter.accepted / max(drafter.drafted, 1)}
        row |= {"pass_ms": drafter.passes.seconds * 1e3}
    return row


def rows_of(bench: Bench, batches: Sequence[int]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for batch in batches:
        prompts = [bench.ids(PROMPT) for _ in range(batch)]
        plain = measured(bench, prompts, None)
        served = measured(bench, prompts, Drafter(8, overlaps=True, predicts=True))
        rows += [{"batch": batch, "what": "none"} | plain, {"batch": batch, "what": "served"} | served]
        for count in (1, 2, 3):
            row = {"batch": batch, "what": f"{count} proposed"} | measured(bench, prompts, Always(count))
            rows.append(row | gains(row["ms"] / plain["ms"], count))
        print(table(rows[-5:]), flush=True)
    return rows


def gains(ratio: float, count: int) -> dict[str, float]:
    """For steps that take `ratio` times as long as those without drafts."""
    return {"even_at": even_at(ratio, count), "times_at_80": (1 + expected(0.8, count)) / ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="glm-4.7-flash", choices=SHAPES)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--quantization", default="auto", choices=("auto", "fp8", "none"))
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 4, 16, 32))
    parser.add_argument("--quick", action="store_true", help="few layers, to see that it runs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(
            json.dumps(SHAPES[args.shape] | ({"num_hidden_layers": 4, "layer_types": None} if args.quick else {}))
        )
        settings = {
            "kv_cache_dtype": args.kv_cache_dtype,
            "quantization": args.quantization,
            "max_num_seqs": 4 * max(args.batches),
            "attention_backend": args.attention_backend,
        }
        config = WorkerConfig(model=folder, device="cuda", load_format="dummy", speculative_algorithm="mtp", **settings)
        runner = load_runner(resolve(config))
        rows = rows_of(Bench(runner, 4 * max(args.batches), 8192, 32768), args.batches)
        runner.close()
    if not args.quick:
        name = "_".join(
            ["mtp", args.shape.replace("-", "_"), *([args.quantization] if args.quantization != "auto" else [])]
        )
        save(name, rows, kv_dtype=runner.kv_dtype, device=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
