"""A layer's mixture of experts: this project's kernels, torch's grouped product between torch's sorts, and the limit.

    python -m bench.experts [--sweep]

In the shapes of Qwen3 30B A3B and of Mixtral 8x7B, random weights in bfloat16, tokens that choose at random, each layer
in turn one of several, under a graph. Limits: the bytes of the experts that are chosen over the copy bandwidth, FLOPs
over the matrix rate, of the same run. The error is relative to float32. With --sweep, every tile that is worth a try.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch.nn import functional as F

from bench.common import save, table
from bench.worker import ceilings, median_ms
from radixrt.worker.cuda import experts as ours
from radixrt.worker.cuda import kernels
from radixrt.worker.cuda.invariant import Tile
from radixrt.worker.model.linear import Linear
from radixrt.worker.model.moe import Experts

SHAPES = {"Qwen3 30B A3B": (128, 8, 2048, 768), "Mixtral 8x7B": (8, 2, 4096, 14336)}
"""Experts, those of a token, hidden size, intermediate size."""
LAYERS = 4
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 8192)


def make(shape: tuple[int, int, int, int]) -> Experts:
    count, chosen, hidden, inner = shape
    gate_up = torch.empty((count, 2 * inner, hidden), dtype=torch.bfloat16, device="cuda").normal_(0, hidden**-0.5)
    down = torch.empty((count, hidden, inner), dtype=torch.bfloat16, device="cuda").normal_(0, inner**-0.5)
    router = torch.empty((count, hidden), dtype=torch.bfloat16, device="cuda").normal_(0, hidden**-0.5)
    return Experts(Linear(router), gate_up, down, chosen, True, "silu", False)


def by_torch(experts: Experts, x: torch.Tensor, residual: torch.Tensor) -> None:
    """Sorted by torch, computed by its grouped product."""
    weights, chosen = experts.route(x)
    order = chosen.flatten().argsort(stable=True)
    count = torch.zeros(len(experts.down), dtype=torch.int32, device=x.device)
    count = count.scatter_add_(0, chosen.flatten(), torch.ones_like(order, dtype=torch.int32))
    ends = count.cumsum(0, dtype=torch.int32)
    inner = F.grouped_mm(x[order // experts.chosen], experts.gate_up.transpose(1, 2), offs=ends)
    found = F.grouped_mm(kernels.gate(inner, experts.activation), experts.down.transpose(1, 2), offs=ends)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    residual.add_((found[back].unflatten(0, (-1, experts.chosen)) * weights[..., None]).sum(1))


Way = Callable[[Experts, torch.Tensor, torch.Tensor], None]


def layer_ms(way: Way, layers: list[Experts], x: torch.Tensor) -> float:
    """Of one layer."""
    residual = torch.zeros_like(x)

    def run() -> None:
        for experts in layers:
            way(experts, x, residual)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return median_ms(graph.replay) / len(layers)


def limit_ms(experts: Experts, x: torch.Tensor, limits: dict[str, float]) -> float:
    chosen = experts.route(x)[1]
    each = experts.gate_up[0].numel() + experts.down[0].numel()
    moved = 2 * each * len(chosen.unique())
    return max(moved / limits["copy_gbs"] / 1e6, 2 * each * chosen.numel() / limits["tflops"] / 1e9)


def error(way: Way, experts: Experts, x: torch.Tensor) -> float:
    """Of a few tokens."""
    found, exact = torch.zeros_like(x), torch.zeros_like(x[:8], dtype=torch.float32)
    way(experts, x, found)
    weights, chosen = experts.route(x[:8])
    for token, (shares, numbers) in enumerate(zip(weights.float(), chosen.tolist(), strict=True)):
        for share, number in zip(shares, numbers, strict=True):
            gate, up = (experts.gate_up[number].float() @ x[token].float()).chunk(2)
            exact[token] += share * (experts.down[number].float() @ (F.silu(gate) * up))
    return float((found[:8].float() - exact).norm() / exact.norm())


def tiles() -> list[Tile]:
    few = [Tile(16, c, d, 4, s) for c, d, s in product((64, 128, 256), (64, 128, 256), (3, 4, 5))]
    more = [Tile(r, c, d, 4, s) for r, c, d, s in product((32, 64), (128, 256), (64, 128), (3, 4))]
    large = [Tile(r, c, 64, 8, s) for r, c, s in product((64, 128), (128, 256), (3, 4))]
    return few + more + large


def swept(layers: list[Experts], x: torch.Tensor) -> list[str]:
    """The best tiles of each product."""
    experts = layers[0]
    chosen = experts.route(x)[1].int()
    found: dict[str, list[tuple[float, Tile]]] = {"gate and up": [], "down": []}
    for tile in tiles():
        order = ours.sort(chosen, len(experts.down), tile.rows)
        inner = torch.randn((chosen.numel(), experts.down.shape[2]), dtype=x.dtype, device=x.device)
        ways = {
            "gate and up": lambda e, x, _, o=order, t=tile: ours._product(x, o, e.gate_up, t, "silu"),
            "down": lambda e, x, _, o=order, t=tile, i=inner: ours._product(i, o, e.down, t, None),
        }
        for name, way in ways.items():
            try:
                found[name].append((layer_ms(way, layers, x), tile))
            except Exception:  # too much shared memory
                continue
    best = {name: sorted(ways, key=lambda one: one[0])[:5] for name, ways in found.items()}
    return [f"{name}: {ms:.4f} {tile}" for name, ways in best.items() for ms, tile in ways]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    args = parser.parse_args()
    limits = ceilings()
    print(limits, flush=True)
    rows: list[dict[str, Any]] = []
    for name, shape in SHAPES.items():
        layers = [make(shape) for _ in range(LAYERS)]
        for tokens in args.tokens:
            x = torch.randn((tokens, shape[2]), dtype=torch.bfloat16, device="cuda")
            ways: dict[str, Way] = {"torch": by_torch, "radixrt": ours.add}
            row: dict[str, Any] = {"experts": name, "tokens": tokens, "limit_ms": limit_ms(layers[0], x, limits)}
            for way, run in ways.items():
                wrong = error(run, layers[0], x)
                assert wrong < 2e-2, f"{name} {tokens} {way}: {wrong}"
                row[f"{way}_ms"] = layer_ms(run, layers, x)
            row["of_limit"] = row["radixrt_ms"] / row["limit_ms"]
            rows.append(row)
            print(row, flush=True)
            if args.sweep:
                print(*swept(layers, x), sep="\n    ", flush=True)
        del layers
    print(table(rows))
    if not args.sweep:
        save("experts", rows, device=torch.cuda.get_device_name(), **limits)


if __name__ == "__main__":
    main()
