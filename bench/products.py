"""Matrix products of a layer, with few and with many rows: radixrt's, torch's, and the limit.

    python -m bench.products [--shapes] [--sweep]

The norms, the gate and the products of a layer of Llama 3.1 8B in the order of a step, without attention, in bfloat16
and in FP8 with scales per row and per block; several layers in turn, whose weights together do not fit in the GPU's L2
cache, in a CUDA graph. Rows are tokens. `torch` is the same with torch's products only. The limit is the weights' bytes
over the copy bandwidth, or FLOPs over the rate of matrix products, both measured in the same run. Each product is
compared with float32 before it is timed. With --shapes, also a norm and a product of many other sizes; with --sweep,
also other tiles, for one product at a time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product as every
from typing import Any

import torch
import triton

from bench.common import save, table
from bench.worker import ceilings
from radixrt.worker.cuda.elementwise.kernels import gate, norm
from radixrt.worker.cuda.linear import fp8, gemm
from radixrt.worker.cuda.linear.gemm import Tile
from radixrt.worker.cuda.linear.quantize_activations import quantize
from radixrt.worker.model.layers.fp8 import BLOCK, FP8, Fp8Activations, Fp8Scaling, Fp8Weight

SHAPES = {"qkv": (6144, 4096), "output": (4096, 4096), "gate and up": (28672, 4096), "down": (4096, 14336)}
TOKENS = (1, 16, 32, 64, 128, 256, 1024, 8192)
KINDS: dict[str, Fp8Scaling | None] = {"bfloat16": None, "fp8_rows": Fp8Scaling.ROWS, "fp8_blocks": Fp8Scaling.BLOCKS}
LAYERS = 4
CACHE = 400_000_000
"""Bytes of the copies of a weight that take turns in `shape_row`, so that they do not stay in the L2 cache."""
COLUMNS, DEPTHS = (512, 1024, 2048, 3072, 5120, 8192, 14336, 28672, 128256), (2048, 4096, 8192, 14336)

Weight = torch.Tensor | Fp8Weight
Inputs = torch.Tensor | Fp8Activations


def drawn(*size: int) -> torch.Tensor:
    return torch.randn(size, device="cuda", dtype=torch.bfloat16)


def graph_us(run: Callable[[], object], parts: int, times: int = 25) -> float:
    """Microseconds per part of a run that has `parts` of them; the median of `times` replays."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
        run()
    found = []
    for _ in range(times):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / parts / 2)
    return sorted(found)[times // 2]


def blocks_of(weight: torch.Tensor) -> Fp8Weight:
    rows, columns = weight.shape
    grid = weight.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scales = grid.abs().amax((1, 3)) / 448
    return Fp8Weight.by_blocks((grid / scales[:, None, :, None]).view(rows, columns).to(FP8), scales)


def weight_of(fp8_scaling: Fp8Scaling | None, columns: int, depth: int) -> Weight:
    wide = 0.02 * drawn(columns, depth)
    return wide if fp8_scaling is None else Fp8Weight.of(wide) if fp8_scaling is Fp8Scaling.ROWS else blocks_of(wide)


def chosen(x: Inputs, weight: Weight) -> Tile | None:
    """The tile that radixrt uses; None for torch's product."""
    if isinstance(weight, Fp8Weight):
        return fp8.tile_for(len(x), weight)
    return gemm.tile_for(len(x), *weight.shape, weight.device)


def multiply(x: Inputs, weight: Weight, out: torch.Tensor, tile: Tile | None, add: bool = False) -> None:
    """Write x @ weight.T to `out`, or with `add` add it; by torch if `tile` is None."""
    if isinstance(weight, Fp8Weight):
        if tile is not None:
            fp8.product(x, weight, None, out, tile, add)
        elif add:
            out.add_(fp8._by_torch(x, weight, None, torch.bfloat16))
        else:
            fp8._by_torch(x, weight, None, torch.bfloat16)
    elif tile is not None:
        splits = gemm.splits_for(*weight.shape, x.device) if tile == chosen(x, weight) else 1
        gemm.multiply(x, weight, out, tile, splits=splits, add=add)
    elif add:
        out.addmm_(x, weight.t())
    else:
        torch.mm(x, weight.t(), out=out)


def check(x: Inputs, weight: Weight, tile: Tile | None) -> None:
    columns = len(weight.values) if isinstance(weight, Fp8Weight) else len(weight)
    exact = (
        x.dequantized() @ weight.dequantized().t() if isinstance(weight, Fp8Weight) else x.float() @ weight.float().t()
    )
    out = torch.zeros(len(x), columns, device="cuda", dtype=torch.bfloat16)
    multiply(x, weight, out, tile, add=True)
    error = float((out.float() - exact).norm() / exact.norm())
    assert error < 4e-3, f"{tuple(exact.shape)} {tile}: {error}"


class Layers:
    """Several layers with weights of one kind."""

    def __init__(self, fp8_scaling: Fp8Scaling | None) -> None:
        self.fp8_scaling = fp8_scaling
        self.weights = [{name: weight_of(fp8_scaling, *size) for name, size in SHAPES.items()} for _ in range(LAYERS)]
        self.norm = torch.ones(4096, device="cuda", dtype=torch.bfloat16)

    def inputs(self, tokens: int, name: str) -> Inputs:
        x = drawn(tokens, SHAPES[name][1])
        return x if self.fp8_scaling is None else quantize(x, self.fp8_scaling)

    def chosen(self, tokens: int) -> dict[str, Tile | None]:
        return {name: chosen(self.inputs(tokens, name), self.weights[0][name]) for name in SHAPES}

    def us(self, tokens: int, tiles: dict[str, Tile | None]) -> float:
        x, attended = drawn(tokens, 4096), drawn(tokens, 4096)
        qkv, both = drawn(tokens, 6144), drawn(tokens, 28672)
        to = self.fp8_scaling
        for name, tile in tiles.items():
            check(self.inputs(min(tokens, 256), name), self.weights[0][name], tile)

        def run() -> None:
            for weights in self.weights:
                multiply(norm(x, self.norm, 1e-5, to), weights["qkv"], qkv, tiles["qkv"])
                heads = attended if to is None else quantize(attended, to)
                multiply(heads, weights["output"], x, tiles["output"], add=True)
                multiply(norm(x, self.norm, 1e-5, to), weights["gate and up"], both, tiles["gate and up"])
                multiply(gate(both, "silu", to), weights["down"], x, tiles["down"], add=True)

        return graph_us(run, LAYERS)


def limit_us(tokens: int, columns: int, depth: int, narrow: bool, limits: dict[str, float]) -> float:
    moved, flops = columns * depth * (1 if narrow else 2), 2 * tokens * columns * depth * (0.5 if narrow else 1)
    return max(moved / limits["copy_gbs"] / 1e3, flops / limits["tflops"] / 1e6)


def tiles_to_try(tokens: int, fp8_scaling: Fp8Scaling | None) -> list[Tile]:
    rows = next(n for n in (16, 32, 64, 128) if tokens <= n or n == 128)
    depths = (128,) if fp8_scaling is Fp8Scaling.BLOCKS else (128, 256)
    found = [Tile(rows, columns, depth, 4, stages) for columns, depth, stages in every((64, 128), depths, (3, 4, 6, 8))]
    return found + [Tile(64, 32, depth, 4, stages) for depth, stages in every(depths, (3, 4, 6))]


def sweep(name: str, layers: Layers, tokens: int) -> None:
    for product in SHAPES:
        taken, found = layers.chosen(tokens), []
        for tile in (taken[product], None, *tiles_to_try(tokens, layers.fp8_scaling)):
            try:
                found.append((layers.us(tokens, {**taken, product: tile}), tile))
            except triton.runtime.errors.OutOfResources:
                continue
        best = sorted(found, key=lambda one: one[0])[:4]
        print(f"{name} {tokens} {product}: {found[0]}", *(f"\n    {us:.1f} {tile}" for us, tile in best), flush=True)


def shape_row(name: str, tokens: int, columns: int, depth: int, limits: dict[str, float]) -> dict[str, Any]:
    """A row of the table for a norm and a product."""
    fp8_scaling = KINDS[name]
    copies = max(2, min(24, CACHE // (columns * depth * (2 if fp8_scaling is None else 1))))
    weights = [weight_of(fp8_scaling, columns, depth) for _ in range(copies)]
    x, ones, out = drawn(tokens, depth), torch.ones(depth, device="cuda").bfloat16(), drawn(tokens, columns)
    given = norm(x, ones, 1e-5, fp8_scaling)
    row: dict[str, Any] = {"kind": name, "tokens": tokens, "columns": columns, "depth": depth}
    row["limit_us"] = limit_us(tokens, columns, depth, fp8_scaling is not None, limits)
    for way, tile in (("radixrt", chosen(given, weights[0])), ("torch", None)):
        check(given, weights[0], tile)

        def run(tile: Tile | None = tile) -> None:
            for weight in weights:
                multiply(norm(x, ones, 1e-5, fp8_scaling), weight, out, tile)

        row[f"{way}_us"] = graph_us(run, copies, 12)
    return row | {"ratio": row["radixrt_us"] / row["torch_us"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", action="store_true", help="also products of other sizes")
    parser.add_argument("--sweep", action="store_true", help="also other tiles; nothing is saved")
    args = parser.parse_args()
    limits = ceilings()
    torch.manual_seed(0)
    rows: dict[int, dict[str, Any]] = {tokens: {"tokens": tokens} for tokens in TOKENS}
    for name, fp8_scaling in KINDS.items():
        layers = Layers(fp8_scaling)
        for tokens, row in rows.items():
            of = [limit_us(tokens, *size, fp8_scaling is not None, limits) for size in SHAPES.values()]
            row[f"{name}_limit_us"] = sum(of)
            row[f"{name}_us"] = layers.us(tokens, layers.chosen(tokens))
            row[f"{name}_torch_us"] = layers.us(tokens, dict.fromkeys(SHAPES))
            if args.sweep and tokens <= 256:
                sweep(name, layers, tokens)
        del layers
        torch.cuda.empty_cache()
    print(table(list(rows.values())), flush=True)
    shapes = []
    if args.shapes:
        sizes = ((c, d) for c, d in every(COLUMNS, DEPTHS) if c * d < 6e8)
        shapes = [
            shape_row(name, tokens, *size, limits)
            for name, tokens, size in every(("bfloat16", "fp8_rows"), (1, 16, 32), list(sizes))
        ]
        print(table(shapes), flush=True)
    if not args.sweep:
        save("products", list(rows.values()), shapes=shapes, device=torch.cuda.get_device_name(), **limits)


if __name__ == "__main__":
    main()
