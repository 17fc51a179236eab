"""A layer's mixture of experts: this project's kernels, torch's sort and grouped products, and the limit.

    python -m bench.experts [--sweep] [--tokens N ...] [--kinds KIND ...]

In the shapes of Qwen3 30B A3B and Mixtral 8x7B, with random weights in bfloat16 and in FP8 (with scales per row and per
block) and random routing; several layers in turn, in a CUDA graph. Limits: the bytes of the chosen experts over the
copy bandwidth, or FLOPs over the rate of matrix products (twice that for FP8), both measured in the same run. The error
is relative to float32, for FP8 to `Experts.one_by_one`. With --sweep, many tiles are timed.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch.nn import functional as F

from bench.common import save, table
from bench.products import blocks_of
from bench.worker import ceilings, median_ms
from radixrt.worker.cuda.elementwise import kernels
from radixrt.worker.cuda.linear.gemm import Tile
from radixrt.worker.cuda.linear.quantize_activations import quantize
from radixrt.worker.cuda.moe import experts as ours
from radixrt.worker.cuda.moe import fp8_experts, routing
from radixrt.worker.model.layers.fp8 import BLOCK, Fp8Scaling, Fp8Weight
from radixrt.worker.model.layers.linear import Linear
from radixrt.worker.model.layers.moe import Experts, ScaledStack
from radixrt.worker.model.layers.ops import TorchOps

SHAPES = {"Qwen3 30B A3B": (128, 8, 2048, 768), "Mixtral 8x7B": (8, 2, 4096, 14336)}
"""(experts, experts per token, hidden size, intermediate size)."""
LAYERS = 4
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 8192)


def make(shape: tuple[int, int, int, int]) -> Experts:
    count, chosen, hidden, inner = shape
    gate_up = torch.empty((count, 2 * inner, hidden), dtype=torch.bfloat16, device="cuda").normal_(0, hidden**-0.5)
    down = torch.empty((count, hidden, inner), dtype=torch.bfloat16, device="cuda").normal_(0, inner**-0.5)
    router = torch.empty((count, hidden), dtype=torch.bfloat16, device="cuda").normal_(0, hidden**-0.5)
    return Experts(Linear(router), gate_up, down, chosen, True, "silu", False)


def in_fp8(experts: Experts, fp8_scaling: Fp8Scaling) -> Experts:
    def stacked(weights: torch.Tensor) -> ScaledStack:
        made = Fp8Weight.of if fp8_scaling is Fp8Scaling.ROWS else blocks_of
        stack = ScaledStack.like(made(weights[0]), len(weights))
        for number, weight in enumerate(weights):
            stack.put(number, made(weight))
        return stack

    return dataclasses.replace(experts, gate_up=stacked(experts.gate_up), down=stacked(experts.down))


def by_torch(experts: Experts, x: torch.Tensor, residual: torch.Tensor) -> None:
    """The reference: tokens are sorted by torch, and multiplied by its grouped product."""
    weights, chosen = experts.route(x)
    order = chosen.flatten().argsort(stable=True)
    count = torch.zeros(len(experts.down), dtype=torch.int32, device=x.device)
    count = count.scatter_add_(0, chosen.flatten(), torch.ones_like(order, dtype=torch.int32))
    ends = count.cumsum(0, dtype=torch.int32)
    inner = F.grouped_mm(x[order // experts.top_k], experts.gate_up.transpose(1, 2), offs=ends)
    found = F.grouped_mm(kernels.gate(inner, experts.activation), experts.down.transpose(1, 2), offs=ends)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    residual.add_((found[back].unflatten(0, (-1, experts.top_k)) * weights[..., None]).sum(1))


def rows_by_torch(experts: Experts, x: torch.Tensor, residual: torch.Tensor) -> None:
    """The reference in FP8 with scales per row: this project's sort, torch's grouped product."""
    weights, chosen = routing.route(experts.router(x), experts.top_k, experts.normalized)
    order, known = routing.sort(chosen, len(experts.down), 0), quantize(x, Fp8Scaling.ROWS)

    def grouped(values: torch.Tensor, scales: torch.Tensor, weight: ScaledStack) -> torch.Tensor:
        return torch._scaled_grouped_mm(
            values, weight.values.transpose(1, 2), scales, weight.scales.squeeze(2), offs=order.ends,
            out_dtype=torch.bfloat16, use_fast_accum=True,
        )  # fmt: skip

    values = ours.spread(known.values.view(torch.int8), order).view(known.values.dtype)
    inner = grouped(values, known.scales.squeeze(1)[order.tokens], experts.gate_up)
    inner = kernels.gate(inner, experts.activation, Fp8Scaling.ROWS)
    ours.combine(grouped(inner.values, inner.scales.squeeze(1), experts.down), weights, order, residual)


Way = Callable[[Experts, torch.Tensor, torch.Tensor], None]


def layer_ms(way: Way, layers: list[Experts], x: torch.Tensor) -> float:
    """Milliseconds per layer."""
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


def limit_ms(experts: Experts, x: torch.Tensor, limits: dict[str, float], size: int = 2) -> float:
    """The limit of one layer. `size`: bytes per weight."""
    chosen = experts.route(x)[1]
    each = experts.gate_up[0].numel() + experts.down[0].numel()
    moved = size * each * len(chosen.unique())
    return max(moved / limits["copy_gbs"] / 1e6, size * each * chosen.numel() / limits["tflops"] / 1e9)


class Gated(TorchOps):
    """Operations of the reference in FP8: activations after the gate are rounded to FP8 as in the kernels."""

    gate = staticmethod(kernels.gate)


def error(way: Way, experts: Experts, x: torch.Tensor) -> float:
    """The relative error of the first tokens."""
    found, exact = torch.zeros_like(x), torch.zeros_like(x[:8], dtype=torch.float32)
    way(experts, x, found)
    if experts.is_fp8:
        experts.one_by_one(x[:8], exact, Gated())
    else:
        weights, chosen = experts.route(x[:8])
        for token, (shares, numbers) in enumerate(zip(weights.float(), chosen.tolist(), strict=True)):
            for share, number in zip(shares, numbers, strict=True):
                gate, up = (experts.gate_up[number].float() @ x[token].float()).chunk(2)
                exact[token] += share * (experts.down[number].float() @ (F.silu(gate) * up))
    return float((found[:8].float() - exact).norm() / exact.norm())


# ---------------------------------------------------------------- tiles


def tiles() -> list[Tile]:
    few = [Tile(16, c, d, 4, s) for c, d, s in product((64, 128, 256), (64, 128, 256), (3, 4, 5))]
    more = [Tile(r, c, d, 4, s) for r, c, d, s in product((32, 64), (128, 256), (64, 128), (3, 4))]
    large = [Tile(r, c, 64, 8, s) for r, c, s in product((64, 128), (128, 256), (3, 4))]
    return few + more + large


def scaled_tiles(fp8_scaling: Fp8Scaling, rows: float) -> list[Tile]:
    """Candidate tiles if an expert has `rows` tokens on average."""
    few = [Tile(r, c, d, 4, s) for r, c, d, s in product((16, 32), (64, 128), (128, 256), (3, 4, 6))]
    widths = (64, 4), (128, 4), (128, 8), (256, 8)
    many = [Tile(r, c, 128, w, s) for r, (c, w), s in product((64, 128), widths, (3, 4))]
    tried = few if rows <= 8 else few[12:] + many[:8] if rows <= 32 else many
    return [t for t in tried if fp8_scaling is Fp8Scaling.ROWS or (t.depth == BLOCK and t.columns <= BLOCK)]


def swept(layers: list[Experts], x: torch.Tensor) -> list[str]:
    """The best tiles for each product, as lines of text."""
    experts = layers[0]
    gate_up, down = experts.gate_up, experts.down
    scaled = experts.is_fp8
    chosen = experts.route(x)[1].int()
    found: dict[str, list[tuple[float, Tile]]] = {"gate and up": [], "down": []}
    inner = torch.randn((chosen.numel(), down[0].shape[1] if not scaled else down.values.shape[2]), device=x.device)
    inner = inner.to(x.dtype)
    known = (quantize(x, gate_up.fp8_scaling), quantize(inner, down.fp8_scaling)) if scaled else None
    for tile in scaled_tiles(down.fp8_scaling, chosen.numel() / len(down)) if scaled else tiles():
        order = routing.sort(chosen, len(down), tile.rows)
        if known is not None:
            ways: dict[str, Way] = {
                "gate and up": lambda e, x, _, o=order, t=tile: fp8_experts.product(
                    known[0], o, e.gate_up, t, x.dtype, of_tokens=True
                ),
                "down": lambda e, x, _, o=order, t=tile: fp8_experts.product(known[1], o, e.down, t, x.dtype),
            }
        else:
            ways = {
                "gate and up": lambda e, x, _, o=order, t=tile: ours._product(x, o, e.gate_up, t, "silu"),
                "down": lambda e, x, _, o=order, t=tile: ours._product(inner, o, e.down, t, None),
            }
        for name, way in ways.items():
            try:
                found[name].append((layer_ms(way, layers, x), tile))
            except Exception:  # too much shared memory
                continue
    best = {name: sorted(ways, key=lambda one: one[0])[:5] for name, ways in found.items()}
    return [f"{name}: {ms:.4f} {tile}" for name, ways in best.items() for ms, tile in ways]


# ---------------------------------------------------------------- all of it


def measure(layers: dict[str, list[Experts]], x: torch.Tensor, limits: dict[str, float]) -> dict[str, Any]:
    """A row of the table: milliseconds per layer of each kind, and limits."""
    wide = layers["bf16"]
    row: dict[str, Any] = {"limit_ms": limit_ms(wide[0], x, limits)}
    ways: dict[str, tuple[Way, str]] = {"torch": (by_torch, "bf16"), "radixrt": (ours.add, "bf16")}
    ways |= {fp8_scaling.value: (ours.add, fp8_scaling.value) for fp8_scaling in Fp8Scaling}
    ways["rows_torch"] = rows_by_torch, Fp8Scaling.ROWS.value
    for name, (way, kind) in ways.items():
        wrong = error(way, layers[kind][0], x)
        assert wrong < (2e-2 if kind == "bf16" else 4e-2), f"{len(x)} {name}: {wrong}"
        row[f"{name}_ms"] = layer_ms(way, layers[kind], x)
        if name == "radixrt":
            row["of_limit"] = row["radixrt_ms"] / row["limit_ms"]
            row["fp8_limit_ms"] = limit_ms(wide[0], x, limits, size=1)
    row["fp8_of_limit"] = row["rows_ms"] / row["fp8_limit_ms"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--kinds", nargs="*", default=("bf16", "rows", "blocks"), help="swept")
    args = parser.parse_args()
    limits = ceilings()
    print(limits, flush=True)
    rows: list[dict[str, Any]] = []
    for name, shape in SHAPES.items():
        layers = {"bf16": [make(shape) for _ in range(LAYERS)]}
        for fp8_scaling in Fp8Scaling:
            layers[fp8_scaling.value] = [in_fp8(experts, fp8_scaling) for experts in layers["bf16"]]
        for tokens in args.tokens:
            x = torch.randn((tokens, shape[2]), dtype=torch.bfloat16, device="cuda")
            rows.append({"experts": name, "tokens": tokens} | measure(layers, x, limits))
            print(rows[-1], flush=True)
            for kind in args.kinds if args.sweep else ():
                print(kind, *swept(layers[kind], x), sep="\n    ", flush=True)
        del layers
    print(table(rows))
    if not args.sweep:
        save("experts", rows, device=torch.cuda.get_device_name(), **limits)


if __name__ == "__main__":
    main()
