"""Products with a weight in INT4: expanded in registers, dequantized first, and the limit; beside those in bfloat16.

    python -m bench.packed_linear [--sweep] [--tokens N ...] [--group 32 | 64 | 128]

In the shapes of Llama 3.1 8B, with random weights with zeros; several copies of a weight in turn, which together do not
fit in the GPU's L2 cache, in a CUDA graph. The limit is the weight's bytes over the copy bandwidth, or FLOPs over the
rate of matrix products, both measured in the same run. Each product is compared with float32 before it is timed. With
--sweep, many tiles are timed, and K is divided among more or fewer programs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import triton

from bench.common import save, table
from bench.products import SHAPES, drawn, graph_us
from bench.worker import ceilings
from radixrt.worker.cuda import int4, ops
from radixrt.worker.cuda.products import Tile, processors
from radixrt.worker.model.int4 import WIDTH, Int4, Int4Linear
from radixrt.worker.model.linear import Linear

TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
SWEPT = (1, 16, 32, 64, 256, 1024)
CACHE = 200_000_000
"""Bytes of the copies of a weight that take turns."""
TILES = {
    16: [(64, 2, 4), (64, 2, 6), (32, 1, 6), (128, 2, 3), (64, 4, 4), (128, 4, 4)],
    32: [(64, 2, 4), (128, 4, 4), (64, 4, 4)],
    64: [(128, 4, 3), (128, 4, 4), (64, 4, 4), (64, 2, 3), (128, 8, 3)],
    128: [(128, 8, 3), (128, 4, 3), (64, 4, 3), (256, 8, 3)],
    256: [(128, 8, 2), (128, 8, 3)],
}
"""Candidates by number of rows: (columns, warps, stages)."""
PROGRAMS = (0, 2, 4, 8)
"""Programs for each multiprocessor, for which K is divided; 0: it is not."""


def random_weight(columns: int, depth: int, group: int) -> Int4:
    q = torch.randint(16, (columns, depth), device="cuda", dtype=torch.uint8)
    scales = torch.full((columns, depth // group), 0.004, dtype=torch.bfloat16, device="cuda")
    zeros = torch.randint(6, 11, scales.shape, device="cuda", dtype=torch.uint8)
    weight = Int4.of(q, scales, zeros, torch.bfloat16)
    assert weight is not None
    return weight


def check(x: torch.Tensor, weight: Int4, run: Callable[[torch.Tensor, Int4, torch.Tensor], None]) -> float:
    """The error relative to float32."""
    out = torch.full((len(x), weight.rows), torch.nan, dtype=x.dtype, device="cuda")
    run(x, weight, out)
    exact = x[:64].float() @ weight.dequantized().float().t()
    error = float((out[:64].float() - exact).norm() / exact.norm())
    assert error < 4e-3, (x.shape, weight.shape, error)
    return error


def us(
    x: torch.Tensor, weights: list[Any], run: Callable[[torch.Tensor, Any, torch.Tensor], None], times: int
) -> float:
    """Microseconds of a product."""
    weight = weights[0]
    out = torch.empty((len(x), len(weight)), dtype=x.dtype, device="cuda")
    return graph_us(lambda: [run(x, weight, out) for weight in weights], len(weights), times)


def splits_for(tiles: int, depth: int, programs: int) -> int:
    most = max(1, triton.cdiv(depth, WIDTH) // 2)
    return max(1, min(most, programs * processors(torch.device("cuda")) // tiles))


def swept(x: torch.Tensor, weights: list[Int4]) -> list[tuple[float, Tile | None, int]]:
    """Microseconds of each way, the fastest first."""
    tokens, (columns, depth) = len(x), weights[0].shape
    found: list[tuple[float, Tile | None, int]] = []
    ways = [(Tile(rows, c, WIDTH, *more), rows) for rows in TILES for c, *more in TILES[rows]]
    for tile, rows in ways:
        if not (rows / 2 < tokens or rows == 16) or rows < min(64, tokens / 8) or (tokens > 32 and rows < 64):
            continue
        tiles = triton.cdiv(columns, tile.columns) * triton.cdiv(tokens, tile.rows)
        for splits in sorted({splits_for(tiles, depth, programs) for programs in PROGRAMS}):
            if splits > 1 and (tokens > 256 or tiles > int4.MOST_TILES):
                continue

            def run(x: torch.Tensor, w: Int4, out: torch.Tensor, tile: Tile = tile, splits: int = splits) -> None:
                int4.multiply(x, w, out, tile, splits)

            try:
                check(x, weights[0], run)
                found.append((us(x, weights, run, 9), tile, splits))
            except Exception as problem:  # too much shared memory, or too many registers
                print(f"    {tile} {splits}: {type(problem).__name__} {str(problem)[:100]}", flush=True)
    if tokens >= 64:
        check(x, weights[0], int4.by_torch)
        found.append((us(x, weights, int4.by_torch, 9), None, 1))
    return sorted(found, key=lambda one: one[0])


def plain(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    Linear(weight, None, False, ops).put(x, out)


def served(x: torch.Tensor, weight: Int4, out: torch.Tensor) -> None:
    Int4Linear(weight, None, False, ops).put(x, out)


def measure(x: torch.Tensor, wide: list[torch.Tensor], packed: list[Int4], limits: dict[str, float]) -> dict[str, Any]:
    """A row of the table: microseconds and the error."""
    flops = 2 * len(x) * wide[0].numel() / limits["tflops"] / 1e6
    row = {
        "error": check(x, packed[0], served),
        "bf16_us": us(x, wide, plain, 25),
        "int4_us": us(x, packed, served, 25),
    }
    row |= {"tile_us": us(x, packed, lambda *a: int4.multiply(*a, int4.LARGE), 9)} if len(x) >= 128 else {}
    row |= {"dequantized_us": us(x, packed, int4.by_torch, 9)} if len(x) >= 64 else {}
    row |= {
        f"{name}_limit_us": max(nbytes / limits["copy_gbs"] / 1e3, flops)
        for name, nbytes in (("bf16", wide[0].nbytes), ("int4", packed[0].nbytes))
    }
    return row | {"of_limit": row["int4_us"] / row["int4_limit_us"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="*", default=None)
    parser.add_argument("--group", type=int, default=128)
    args = parser.parse_args()
    torch.manual_seed(0)
    limits = ceilings()
    print(limits, flush=True)
    assert int4.there(torch.device("cuda"), torch.bfloat16)
    rows: list[dict[str, Any]] = []
    for name, (columns, depth) in SHAPES.items():
        first = random_weight(columns, depth, args.group)
        packed = [first] + [random_weight(columns, depth, args.group) for _ in range(1, -(-CACHE // first.nbytes))]
        wide = [0.02 * drawn(columns, depth) for _ in range(max(2, -(-CACHE // (2 * columns * depth))))]
        for tokens in args.tokens or (SWEPT if args.sweep else TOKENS):
            x = drawn(tokens, depth)
            few = slice(None) if tokens <= 64 else slice(2)
            if args.sweep:
                best = swept(x, packed[few])
                print(name, tokens, f"bf16 {us(x, wide[few], plain, 9):.2f} us", flush=True)
                for one, tile, splits in best[:8] + [b for b in best[8:] if b[1] is None]:
                    shape = "dequantized" if tile is None else (tile.rows, tile.columns, tile.warps, tile.stages)
                    print(f"    {one:.2f}", shape, splits, flush=True)
            else:
                rows.append({"product": name, "tokens": tokens} | measure(x, wide[few], packed[few], limits))
                print(rows[-1], flush=True)
        del wide, packed
    if rows:
        print(table(rows))
        save("packed_linear", rows, device=torch.cuda.get_device_name(), group=args.group, **limits)


if __name__ == "__main__":
    main()
