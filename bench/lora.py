"""A step of a worker with LoRA adapters for all projections of Llama 3.1 8B, random weights.

    python -m bench.lora [--ranks 16,64] [--quick]

Rows: no adapters loaded; adapters loaded, and a batch without any, of one, or of all of them in turn. Attention is that
of Triton and Gluon alone. The kernels are compared with the reference first.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.common import save, table
from bench.shapes import LLAMA_8B
from bench.worker import STEPS, Bench
from radixrt.config import WorkerConfig, resolve
from radixrt.worker.cuda.linear import lora
from radixrt.worker.load import runner as loading
from radixrt.worker.model.lora.adapter import Adapter, Pair
from radixrt.worker.model.lora.lora import Rows, Stack, add_by_adapter

ADAPTERS = 8
BATCHES = 1, 64, 256
CONTEXT, NEW = 1024, 8192


def random_adapter(name: str, config: dict[str, Any], rank: int) -> Adapter:
    """Matrices for all projections of all layers."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes = {f"self_attn.{x}_proj": (size, hidden) for x, size in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden))}
    shapes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    pairs = {
        f"layers.{layer}.{module}": Pair(_normal(rank, columns), _normal(rows, rank), 1.0)
        for layer in range(config["num_hidden_layers"])
        for module, (rows, columns) in shapes.items()
    }
    return Adapter(name, pairs)


def _normal(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) / math.sqrt(columns)


def check(rank: int) -> float:
    """The largest difference of the kernels from the reference, in standard deviations of the result, over some numbers
    of rows."""
    largest = 0.0
    for count in (1, 70, 256, 3000):
        a, b = _normal(3 * ADAPTERS * rank, 4096), _normal(ADAPTERS * 6144, rank)
        stack = Stack(a.view(ADAPTERS, 3 * rank, 4096), b.view(ADAPTERS, 6144, rank), (4096, 1024, 1024))
        rows = Rows()
        rows.use(torch.randint(-1, ADAPTERS, (count,), dtype=torch.int32, device="cuda"))
        x, found = _normal(count, 4096) * 64, torch.zeros(count, 6144, device="cuda", dtype=torch.bfloat16)
        expected = found.float()
        add_by_adapter(x.float(), Stack(stack.a.float(), stack.b.float(), stack.sizes), rows, expected, 1.0, False)
        lora.lora(x, stack, rows, found, 1.0, False)
        largest = max(largest, ((found.float() - expected).abs().max() / expected.std().clamp_min(1e-9)).item())
    return largest


def decode_ms(bench: Bench, batch: int, used: list[str]) -> float:
    """Milliseconds of a decode step; request n has adapter n of `used`, again and again."""
    for number in range(batch):
        bench.add(bench.ids(CONTEXT), 2 * STEPS + 16, adapter=used[number % len(used)])
    bench.settle()
    for _ in range(8):
        bench.step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        bench.step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    bench.finish()
    return seconds / STEPS * 1e3


def prefill_ms(bench: Bench, used: list[str]) -> float:
    """Milliseconds of a step of NEW tokens, in one prompt for each adapter of `used`; the best of three."""
    times = []
    for _ in range(4):
        for name in used:
            bench.add(bench.ids(NEW // len(used)), 1, adapter=name)
        torch.cuda.synchronize()
        began = time.perf_counter()
        bench.finish()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times[1:]) * 1e3


def measured(folder: str, config: dict[str, Any], rank: int) -> list[dict[str, Any]]:
    """The rows of one rank; 0: no adapters are loaded."""
    names = [f"a{number}" for number in range(ADAPTERS)] if rank else []
    adapters = [random_adapter(name, config, rank) for name in names]
    loading.read_lora = lambda *_: adapters
    settings = {"load_format": "dummy", "max_total_tokens": 400_000, "attention_backend": "triton"}
    worker = resolve(WorkerConfig(model=folder, device="cuda", **settings))
    began = time.perf_counter()
    runner = loading.load_runner(worker)
    adapters.clear()
    print(f"rank {rank}: loaded in {time.perf_counter() - began:.0f} s", flush=True)
    bench = Bench(runner, worker.max_num_seqs, worker.max_num_batched_tokens, 16384, tuple(names))
    rows = []
    for used in ([""], names[:1], names) if names else ([""],):
        row: dict[str, Any] = {"rank": rank, "loaded": len(names), "used": len([name for name in used if name])}
        row |= {f"decode {batch}": decode_ms(bench, batch, used) for batch in BATCHES}
        row[f"{NEW} new"] = prefill_ms(bench, used)
        rows.append(row)
        print(row, flush=True)
    runner.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="16,64")
    parser.add_argument("--quick", action="store_true", help="two layers, to see that it runs")
    args = parser.parse_args()
    ranks = [int(rank) for rank in args.ranks.split(",")]
    with torch.inference_mode():
        for rank in ranks:
            print(f"rank {rank}: at most {check(rank):.3f} standard deviations from the reference")
            assert check(rank) < 0.1
    rows: list[dict[str, Any]] = []
    config = LLAMA_8B | ({"num_hidden_layers": 2} if args.quick else {})
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        for rank in (0, *ranks):
            rows += measured(folder, config, rank)
            gc.collect()  # the runner before, and its memory
            torch.cuda.empty_cache()
            print(table(rows), flush=True)
            if not args.quick:
                save("lora", rows, device=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
