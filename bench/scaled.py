"""Products of one layer in FP8: those of radixrt beside bfloat16's, torch's own, and the limit.

    python -m bench.scaled [--sweep]

Matrices of Llama 3.1 8B, weights that lie in the L2 cache of no chip, under a CUDA graph. Rows are tokens. A product in
FP8 takes activations that are rounded already, by the kernel that makes them; `round` is what that takes by itself. The
limit is the weights' bytes over the bandwidth, or the operations over twice the rate of bfloat16, both of the same run.
Each product is compared with float32 before it is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product as every
from typing import Any

import torch
import triton
from torch.nn import functional as F

from bench.common import save, table
from bench.worker import ceilings
from radixrt.worker.cuda.invariant import Tile
from radixrt.worker.cuda.rounding import quantize
from radixrt.worker.cuda.scaled import _by_torch, product, scaled, tile_for
from radixrt.worker.model.scaled import BLOCK, FP8, Rounding, Scaled

SHAPES = {"qkv": (6144, 4096), "output": (4096, 4096), "gate and up": (28672, 4096), "down": (4096, 14336)}
TOKENS = (1, 16, 32, 64, 128, 256, 1024, 8192)
CACHE = 400_000_000
"""Bytes of copies of a weight that take turns."""


def graph_us(run: Callable[[int], object], times: int) -> float:
    """Microseconds of run(i), the median of some replays."""
    for i in range(times):
        run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(times):
            run(i)
    found = []
    for _ in range(10):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / times)
    return sorted(found[3:])[3]


def blocks_of(weight: torch.Tensor) -> Scaled:
    rows, columns = weight.shape
    grid = weight.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scales = grid.abs().amax((1, 3)) / 448
    return Scaled.by_blocks((grid / scales[:, None, :, None]).view(rows, columns).to(FP8), scales)


def tiles(rows: int) -> list[Tile]:
    if rows <= 16:
        return [Tile(16, c, d, 4, s) for c, d, s in every((32, 64, 128), (128, 256), (3, 4, 6))]
    return [Tile(64, c, d, 4, s) for c, d, s in every((32, 64, 128), (128, 256), (2, 3, 4))]


def measure(name: str, tokens: int, limits: dict[str, float], sweep: bool) -> dict[str, Any]:
    columns, depth = SHAPES[name]
    copies = max(2, CACHE // (columns * depth))
    times = copies * (1 if tokens > 256 else 2)
    wide = [0.02 * torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    x = torch.randn(tokens, depth, device="cuda", dtype=torch.bfloat16)
    flops = 2 * tokens * columns * depth
    limit = max(columns * depth / limits["copy_gbs"] / 1e3, flops / limits["tflops"] / 2e6)
    row: dict[str, Any] = {"product": name, "tokens": tokens, "limit_us": limit}
    row["bf16_us"] = graph_us(lambda i: F.linear(x, wide[i % copies]), times)
    for rounding, made in ((Rounding.ROWS, Scaled.of), (Rounding.BLOCKS, blocks_of)):
        weights, of = [made(weight) for weight in wide], rounding.value
        known = quantize(x, rounding)
        exact = known.wide() @ weights[0].wide().t()
        found = scaled(known, weights[0], None, torch.bfloat16)
        error = float((found.float() - exact).norm() / exact.norm())
        assert error < 4e-3, f"{name} {tokens} {of}: {error}"
        row[f"{of}_us"] = graph_us(lambda i, w=weights, k=known: scaled(k, w[i % copies], None, torch.bfloat16), times)
        row[f"{of}_torch_us"] = graph_us(
            lambda i, w=weights, k=known: _by_torch(k, w[i % copies], None, torch.bfloat16), times
        )
        row[f"{of}_round_us"] = graph_us(lambda i, r=rounding: quantize(x, r), times)
        if sweep and tokens <= 64:
            out = torch.empty(tokens, columns, device="cuda", dtype=torch.bfloat16)
            best = []
            for tile in tiles(tokens):
                if rounding is Rounding.BLOCKS and tile.depth != BLOCK:
                    continue
                try:
                    us = graph_us(
                        lambda i, w=weights, k=known, o=out, t=tile: product(k, w[i % copies], None, o, t), times
                    )
                except triton.runtime.errors.OutOfResources:
                    continue
                best.append((us, tile))
            best.sort(key=lambda one: one[0])
            chosen = tile_for(tokens, weights[0])
            print(
                f"{name} {tokens} {of}, {chosen} is taken", *(f"\n    {us:.2f} {t}" for us, t in best[:4]), flush=True
            )
    row["of_limit"] = row["rows_us"] / limit
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="also other tiles")
    args = parser.parse_args()
    limits = ceilings()
    torch.manual_seed(0)
    rows = [measure(name, tokens, limits, args.sweep) for tokens, name in every(TOKENS, SHAPES)]
    for tokens in TOKENS:  # a layer
        parts = [row for row in rows if row["tokens"] == tokens]
        whole = {key: sum(part[key] for part in parts) for key in parts[0] if key.endswith("_us")}
        rows.append(
            {"product": "a layer's", "tokens": tokens} | whole | {"of_limit": whole["rows_us"] / whole["limit_us"]}
        )
    print(limits)
    print(table(rows))
    if not args.sweep:
        save("scaled", rows, device=torch.cuda.get_device_name(), **limits)


if __name__ == "__main__":
    main()
