"""A layer of experts: kept in MXFP4 or INT4, or dequantized to bfloat16, with the limits of both.

    python -m bench.packed_experts [--int4] [--sweep] [--hopper] [--tokens N ...] [--seconds S]

In the shapes of gpt-oss 20b and 120b, for INT4 of Qwen3 30B A3B with groups of 128, with random weights and random
routing; several layers in turn, in a CUDA graph. Limits: the bytes of the chosen experts over the copy bandwidth, or
FLOPs over the rate of matrix products, both measured in the same run. The error is relative to float32. With --sweep,
all tiles in ROWS are timed; with --hopper, the kernel for Hopper with all of its tiles, and without it.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

import torch

from bench.common import save, table
from bench.experts import Way, layer_ms, limit_ms, make
from bench.packed_linear import random_weight
from bench.worker import ceilings
from radixrt.worker.cuda.linear.gemm import Tile
from radixrt.worker.cuda.moe import experts as ours
from radixrt.worker.cuda.moe import packed_experts, routing
from radixrt.worker.model.layers.int4 import Int4
from radixrt.worker.model.layers.moe import Experts
from radixrt.worker.model.layers.mxfp4 import BLOCK, WIDTH, PackedStack
from radixrt.worker.model.layers.ops import TorchOps

SHAPES = {"gpt-oss 20b": (32, 4, 2880, 2880), "gpt-oss 120b": (128, 4, 2880, 2880)}
"""(experts, experts per token, hidden size, intermediate size)."""
INT4_SHAPES = {"Qwen3 30B A3B": (128, 8, 2048, 768)}
LAYERS = {"gpt-oss 20b": 4, "gpt-oss 120b": 2, "Qwen3 30B A3B": 2}
"""Number of layers that take turns."""
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 8192)
MXFP4_BYTES = 0.5 + 1 / BLOCK
"""Bytes per weight."""


def in_mxfp4(experts: Experts) -> Experts:
    """Experts of the same shape in MXFP4: random 4-bit values (standard deviation: about 2.9) and one scale, chosen
    so that results are about as large as those of `experts`."""

    def stacked(weight: torch.Tensor) -> PackedStack:
        count, rows, columns = weight.shape
        stack = PackedStack.empty(count, rows, columns, device=weight.device)
        for number in range(count):
            blocks = torch.randint(256, (rows, columns // BLOCK, 16), dtype=torch.uint8, device=weight.device)
            stack.put(number, blocks, torch.full((rows, columns // BLOCK), 120, dtype=torch.uint8, device="cuda"))
        return stack

    return dataclasses.replace(experts, gate_up=stacked(experts.gate_up), down=stacked(experts.down))


def in_int4(experts: Experts) -> Experts:
    """Experts of the same shape in INT4, with zeros."""

    def stacked(weight: torch.Tensor) -> Int4:
        count, rows, columns = weight.shape
        each = [random_weight(rows, columns, 128) for _ in range(count)]
        stack = each[0].stack(count)
        for number, weight in enumerate(each):
            stack.put(number, weight)
        return stack

    return dataclasses.replace(experts, gate_up=stacked(experts.gate_up), down=stacked(experts.down))


def error(experts: Experts, x: torch.Tensor) -> float:
    """The error of the first tokens, relative to float32."""
    found, exact = torch.zeros_like(x), torch.zeros_like(x[:8], dtype=torch.float32)
    ours.add(experts, x, found)
    experts.one_by_one(x[:8], exact, TorchOps())
    return float((found[:8].float() - exact).norm() / exact.norm())


# ---------------------------------------------------------------- tiles

ROWS = {
    16: (
        [(64, 2, 4), (32, 2, 4), (64, 4, 4), (64, 4, 6), (128, 4, 3), (128, 8, 4)],
        [(64, 2, 4), (32, 2, 6), (64, 4, 6), (64, 4, 8), (128, 4, 4), (128, 8, 4)],
    ),
    32: ([(32, 2, 4), (64, 4, 4), (128, 8, 3), (128, 4, 3)], [(64, 2, 4), (64, 4, 5), (128, 4, 4), (128, 8, 4)]),
    64: ([(64, 4, 3), (128, 8, 3), (128, 8, 2)], [(128, 4, 3), (128, 8, 3), (64, 4, 4)]),
    128: ([(128, 8, 2), (128, 8, 3), (64, 4, 3)], [(128, 8, 3), (128, 8, 2), (128, 4, 3)]),
    256: ([(64, 8, 2)], [(128, 8, 2)]),
}
"""Candidate tiles by number of rows: (columns, warps, stages), for gate and up, and for down."""


def worth(rows: float) -> list[int]:
    """Candidate numbers of rows of a tile, if an expert has `rows` tokens on average."""
    return [tile for tile in ROWS if tile <= max(16, 4 * rows) and tile >= min(64, rows / 4)]


def swept(layers: list[Experts], x: torch.Tensor) -> dict[str, list[tuple[float, Tile]]]:
    """The best tiles for each product, with the milliseconds per layer."""
    experts = layers[0]
    count = len(experts.down)
    chosen = experts.route(x)[1].int()
    inner = torch.randn((chosen.numel(), experts.down.columns), device=x.device).to(x.dtype)
    found: dict[str, list[tuple[float, Tile]]] = {"gate and up": [], "down": []}
    for rows in worth(chosen.numel() / count):
        order = routing.sort(chosen, count, rows)
        for name, kinds in zip(found, ROWS[rows], strict=True):
            for columns, warps, stages in kinds:
                tile = Tile(rows, columns, WIDTH, warps, stages)
                ways: dict[str, Way] = {
                    "gate and up": lambda e, x, _, t=tile, o=order: packed_experts.product(x, o, e.gate_up, t, "silu"),
                    "down": lambda e, x, _, t=tile, o=order: packed_experts.product(inner, o, e.down, t, None),
                }
                try:
                    found[name].append((layer_ms(ways[name], layers, x), tile))
                except Exception as problem:  # too much shared memory, or too many registers
                    print(f"    {tile}: {str(problem)[:80]}", flush=True)
    return {name: sorted(ways, key=lambda one: one[0])[:5] for name, ways in found.items()}


def on_hopper(layers: list[Experts], x: torch.Tensor) -> dict[str, float]:
    """Milliseconds per layer: without the kernel for Hopper, and with each of its tiles."""
    kernel = packed_experts._hopper(x.device)
    assert kernel is not None
    before, found = (kernel.MIN_ROWS, kernel.kind_for), {}
    rows = len(x) * layers[0].top_k / len(layers[0].down)
    for kind in (None, *(kind for kind in kernel.KINDS if rows / 4 <= kind.rows <= max(32, 4 * rows))):
        kernel.MIN_ROWS, kernel.kind_for = (0, lambda _, kind=kind: kind) if kind else (1e9, None)
        wrong = error(layers[0], x)
        assert wrong < 2e-2, (kind, wrong)
        found[f"{kind.rows} rows" if kind else "not"] = layer_ms(ours.add, layers, x)
    kernel.MIN_ROWS, kernel.kind_for = before
    return found


# ---------------------------------------------------------------- all of it


def measure(wide: list[Experts], packed: list[Experts], x: torch.Tensor, limits: dict[str, float]) -> dict[str, Any]:
    """A row of the table: milliseconds per layer, limits and the error."""
    wrong = error(packed[0], x)
    assert wrong < 2e-2, wrong
    row = {"bf16_ms": layer_ms(ours.add, wide, x), "packed_ms": layer_ms(ours.add, packed, x)}
    flops = 2 * (wide[0].gate_up[0].numel() + wide[0].down[0].numel()) * len(x) * wide[0].top_k
    least = {"bf16_limit_ms": limit_ms(wide[0], x, limits)}
    moved = len(wide[0].route(x)[1].unique()) * packed[0].down.nbytes * 3 / len(packed[0].down)
    least["packed_limit_ms"] = max(moved / limits["copy_gbs"] / 1e6, flops / limits["tflops"] / 1e9)
    return row | least | {"of_limit": row["packed_ms"] / least["packed_limit_ms"], "error": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--int4", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--hopper", action="store_true", help="of MXFP4; has a result file of its own")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing more after that")
    args = parser.parse_args()
    began, limits = time.monotonic(), ceilings()
    print(limits, flush=True)
    rows: list[dict[str, Any]] = []
    for name, shape in (INT4_SHAPES if args.int4 else SHAPES).items():
        wide = [make(shape) for _ in range(LAYERS[name])]
        packed = [(in_int4 if args.int4 else in_mxfp4)(experts) for experts in wide]
        for tokens in args.tokens:
            if time.monotonic() - began > args.seconds:
                break
            x = torch.randn((tokens, shape[2]), dtype=torch.bfloat16, device="cuda")
            rows.append({"experts": name, "tokens": tokens} | measure(wide, packed, x, limits))
            if args.hopper and not args.int4:
                rows[-1] |= on_hopper(packed, x)
            print(rows[-1], flush=True)
            if args.sweep:
                for kind, best in swept(packed, x).items():
                    print(name, tokens, kind, *(f"{ms:.4f} {t}" for ms, t in best), sep="\n    ", flush=True)
        del wide, packed
    print(table(rows))
    if not args.sweep:
        save(
            f"packed_experts{'_int4' * args.int4}{'_hopper' * args.hopper}",
            rows,
            device=torch.cuda.get_device_name(),
            **limits,
        )


if __name__ == "__main__":
    main()
