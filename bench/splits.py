"""Products of few rows whose K is divided among programs: how many splits are fastest.

    python -m bench.splits [--experts] [--rows N ...] [--only N]

Of weights in bfloat16, norm and product, as in a step, and torch's product for comparison; with --experts, the two
products of a layer of experts in MXFP4 (gpt-oss 20b). Several weights in turn, which do not fit in the L2 cache, in a
CUDA graph. Each product is compared with that of one split, or float32, before it is timed. --only: of experts,
tiles of this number alone.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import triton

from bench.common import save, table
from bench.experts import Way, layer_ms, make
from bench.packed_experts import in_mxfp4
from bench.products import CACHE, drawn, graph_us
from radixrt.worker.cuda.elementwise.kernels import norm
from radixrt.worker.cuda.linear import gemm
from radixrt.worker.cuda.linear.gemm import Tile, multiply
from radixrt.worker.cuda.moe import packed_experts, routing
from radixrt.worker.model.layers.mxfp4 import WIDTH

SHAPES = {
    "Qwen3 30B output": (2048, 4096), "Qwen3 30B qkv": (5120, 2048), "Qwen3 30B router": (128, 2048),
    "gpt-oss 20b output": (2880, 4096), "gpt-oss 20b qkv": (5120, 2880), "gpt-oss 20b router": (32, 2880),
    "DeepSeek V3 router": (256, 7168), "Qwen3 4B down": (2560, 9728), "Llama 8B output": (4096, 4096),
    "Llama 8B down": (4096, 14336),
}  # fmt: skip
"""(columns, K) of weights."""
SPLITS = (1, 2, 3, 4, 6, 8, 16)
EXPERTS = 32, 4, 2880, 2880
TILES = [
    Tile(16, columns, WIDTH, warps, stages)
    for columns, warps, stages in ((64, 4, 4), (64, 4, 2), (32, 2, 4), (128, 4, 3))
]


def product_row(name: str, rows: int) -> dict[str, Any]:
    """A row of the table for a weight: microseconds by splits."""
    columns, depth = SHAPES[name]
    copies = max(2, min(24, CACHE // (columns * depth * 2)))
    weights = [0.02 * drawn(columns, depth) for _ in range(copies)]
    x, ones, out = drawn(rows, depth), torch.ones(depth, device="cuda").bfloat16(), drawn(rows, columns)
    row: dict[str, Any] = {"weight": name, "rows": rows}
    exact = norm(x, ones, 1e-5, None).float() @ weights[0].float().t()

    def us(tile: Tile | None, splits: int) -> float:
        def one(weight: torch.Tensor) -> None:
            given = norm(x, ones, 1e-5, None)
            if tile is None:
                torch.mm(given, weight.t(), out=out)
            else:
                multiply(given, weight, out, tile, splits=splits)

        one(weights[0])
        assert (out.float() - exact).norm() / exact.norm() < 4e-3, (name, splits)
        return graph_us(lambda: [one(weight) for weight in weights], copies, 12)

    row["torch"] = us(None, 1)
    high = next(most for most in gemm.STREAMED if rows <= most)
    for splits in SPLITS:
        programs = splits * triton.cdiv(columns, gemm.COLUMNS)
        if programs <= 3 * gemm.num_sms(x.device) and depth >= splits * 128:
            for stages in (8, 4):
                row[f"{splits}/{stages}"] = us(Tile(high, gemm.COLUMNS, 128, 4, stages), splits)
    return row


def experts_rows(tokens: int, only: int | None) -> list[dict[str, Any]]:
    """Rows of the table for experts: microseconds of both products by splits, for each tile."""
    layers = [in_mxfp4(make(EXPERTS)) for _ in range(4)]
    x = drawn(tokens, EXPERTS[2])
    chosen = layers[0].route(x)[1].int()
    inner, found = drawn(chosen.numel(), EXPERTS[3]), []
    for tile in TILES if only is None else TILES[only : only + 1]:
        order = routing.sort(chosen, EXPERTS[0], tile.rows)
        for kind in ("gate and up", "down"):
            row: dict[str, Any] = {
                "tokens": tokens,
                "product": kind,
                "tile": f"{tile.columns}/{tile.warps}/{tile.stages}",
            }
            first = kind == "gate and up"

            def way(e, given, _, n=1, t=tile, o=order, first=first):
                weight, source = (e.gate_up, given) if first else (e.down, inner)
                return packed_experts.product(source, o, weight, t, "silu" if first else None, splits=n)

            whole = way(layers[0], x, None).float()
            for splits in (1, 2, 4, 6):
                split: Way = lambda e, given, _, n=splits: way(e, given, _, n)  # noqa: E731
                assert (split(layers[0], x, None).float() - whole).norm() / whole.norm() < 1e-2
                row[str(splits)] = 1e3 * layer_ms(split, layers, x)
            found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--rows", type=int, nargs="*", default=(1, 16, 32))
    parser.add_argument("--only", type=int)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.experts:
        rows = [row for tokens in args.rows for row in experts_rows(tokens, args.only)]
    else:
        rows = [product_row(name, rows) for rows in args.rows for name in SHAPES]
    print(table(rows), flush=True)
    if args.only is None:
        save("splits_experts" if args.experts else "splits", rows, device=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
