"""Drafts of a model's multi-token prediction layer, on a worker alone on a GPU, as in `bench.worker`.

    python -m bench.mtp [--shape glm-4.7-flash] [--kv-cache-dtype fp8_e4m3] [--quantization fp8] [--quick]

Random weights, whose layer predicts nothing. So the layer proposes as it always does, but what is drafted is the text
of the first run, in which each token is right with a given probability ("0.8 of 2": two tokens, 80%; 0% is what drafts
cost at most). `right` is the share of drafted tokens that were accepted; a text may part from that of the first run, by
rounding. "served" is the real drafter, which has to find out that the proposals are useless.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.common import save, table
from bench.shapes import SHAPES
from bench.worker import Bench
from radixrt.config import WorkerConfig, resolve
from radixrt.worker.drafting import Drafter
from radixrt.worker.loading import load_runner
from radixrt.worker.request import Request

PROMPT, TOKENS = 1024, 192


class Recorder(Drafter):
    """Drafts nothing, and remembers each request's text by its prompt."""

    def __init__(self) -> None:
        super().__init__(1, overlaps=True)
        self.texts: dict[bytes, list[int]] = {}

    def begins(self, request: Request, requests: int) -> bool:
        return False

    def ends(self, request: Request) -> None:
        self.texts[request.tokens[: request.prompt_len].tobytes()] = request.tokens.tolist()


class Chance(Drafter):
    """Drafts up to `size` tokens of `texts`, each of which is right with a probability of `right`."""

    def __init__(self, size: int, right: float, texts: dict[bytes, list[int]]) -> None:
        super().__init__(size, overlaps=True, predicts=True)
        self._right = right
        self._texts = texts
        self._random = random.Random(0)

    def proposes(self, requests: list[Request]) -> int:
        return self.most

    def begins(self, request: Request, requests: int) -> bool:
        return request.total + 2 <= request.limit

    def draft(self, request: Request, most: int, requests: int) -> list[int]:
        text, done = self._texts[request.tokens[: request.prompt_len].tobytes()], len(request.tokens)
        ids = text[done : done + min(most, self.most, request.limit - done - 1)]
        return [id if self._random.random() < self._right else id ^ 1 for id in ids]

    def ends(self, request: Request) -> None:
        """There is nothing to remember."""


def measured(bench: Bench, prompts: list[Any], drafter: Drafter) -> dict[str, Any]:
    scheduler = bench.worker.scheduler
    scheduler.drafter = drafter
    for ids in prompts:
        bench.add(ids, TOKENS)
    bench.settle()
    torch.cuda.synchronize()
    steps, began = scheduler.steps, time.perf_counter()
    tokens = bench.finish()
    seconds, steps = time.perf_counter() - began, scheduler.steps - steps
    row = {"ms": seconds / steps * 1e3, "tokens_s": tokens / seconds, "tokens_a_step": tokens / steps / len(prompts)}
    if drafter.drafted:
        row |= {"right": drafter.accepted / drafter.drafted, "drafted": drafter.drafted / tokens}
    if drafter.predicts:
        row["pass_ms"] = drafter.passes.seconds * 1e3
    return row


def rows_of(bench: Bench, few: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for batch in (1, 8) if few else (1, 4, 16, 32):
        prompts, recorder = [bench.ids(PROMPT) for _ in range(batch)], Recorder()
        measured(bench, prompts, recorder)
        ways: list[tuple[str, Drafter]] = [("none", recorder), ("served", Drafter(8, True, predicts=True))]
        ways += [
            (f"{chance:.1f} of {k}", Chance(k, chance, recorder.texts)) for chance in (0.0, 0.8) for k in (1, 2, 3)
        ]
        plain = 0.0
        for what, drafter in ways:
            row = {"batch": batch, "what": what} | measured(bench, prompts, drafter)
            plain = plain or row["tokens_s"]
            rows.append(row | {"times": row["tokens_s"] / plain})
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="glm-4.7-flash", choices=SHAPES)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--quantization", default="auto", choices=("auto", "fp8", "none"))
    parser.add_argument("--few", action="store_true", help="two batches")
    parser.add_argument("--quick", action="store_true", help="few layers and two batches, to see that it runs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(
            json.dumps(SHAPES[args.shape] | ({"num_hidden_layers": 4, "layer_types": None} if args.quick else {}))
        )
        settings = {"kv_cache_dtype": args.kv_cache_dtype, "quantization": args.quantization, "max_num_seqs": 128}
        settings["attention_backend"] = args.attention_backend
        config = WorkerConfig(model=folder, device="cuda", load_format="dummy", speculative_algorithm="mtp", **settings)
        runner = load_runner(resolve(config))
        rows = rows_of(Bench(runner, 128, 8192, 32768), args.few or args.quick)
        runner.close()
    print(table(rows))
    if not args.quick:
        name = "_".join(
            ["mtp", args.shape.replace("-", "_"), *([args.quantization] if args.quantization != "auto" else [])]
        )
        save(name, rows, kv_dtype=runner.kv_dtype, device=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
