"""Products with a weight in INT4: expanded in registers, dequantized first, and the limit; beside those in bfloat16.

    python -m bench.packed_linear [--sweep] [--tokens N ...] [--group 32 | 64 | 128]

In the shapes of Llama 3.1 8B, with random weights with zeros; several copies of a weight in turn, which together do not
fit in the GPU's L2 cache, in a CUDA graph. The limit is the weight's bytes over the copy bandwidth, or FLOPs over the
rate of matrix products, both measured in the same run. Each product is compared with float32 before it is timed. With
--sweep, many tiles are timed instead, and K is divided among more or fewer programs; with --tiles those of Hopper.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import triton

from bench.common import save, table
from bench.products import SHAPES, drawn, graph_us
from bench.worker import ceilings
from radixrt.worker.cuda import ops
from radixrt.worker.cuda.linear import dequant, int4
from radixrt.worker.cuda.linear.gemm import Tile, num_sms
from radixrt.worker.model.layers.int4 import WIDTH, Int4, Int4Linear
from radixrt.worker.model.layers.linear import Linear

TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
SWEPT = (16, 64, 256, 1024, 1, 32, 128)
FEWEST = 8
"""The fewest rows for which the kernel for Hopper is timed."""
CACHE = 200_000_000
"""Bytes of the copies of a weight that take turns."""
TILES = {
    16: [(64, 2, 3), (32, 2, 3), (128, 2, 3)],
    32: [(64, 4, 3), (64, 2, 3), (128, 4, 2)],
    64: [(64, 4, 3), (128, 4, 2), (64, 4, 2), (64, 2, 3), (256, 8, 2)],
    128: [(128, 8, 2), (64, 4, 2), (256, 8, 2)],
}
"""Candidates by number of rows: (columns, warps, stages)."""
SPLITS = 1, 2, 4
"""Numbers of programs that K is divided among."""
AHEAD = 0, 16
"""Other numbers of blocks that are prefetched."""
CHUNKS = 1 << 23, 1 << 25
"""Other numbers of weights that are dequantized at a time."""


def random_weight(columns: int, depth: int, group: int) -> Int4:
    q = torch.randint(16, (columns, depth), device="cuda", dtype=torch.uint8)
    scales = torch.full((columns, depth // group), 0.004, dtype=torch.bfloat16, device="cuda")
    zeros = torch.randint(6, 11, scales.shape, device="cuda", dtype=torch.uint8)
    weight = Int4.of(q, scales, zeros, torch.bfloat16)
    assert weight is not None
    return weight


Run = Callable[[torch.Tensor, Any, torch.Tensor], None]


def check(x: torch.Tensor, weight: Int4, run: Run, exact: torch.Tensor | None = None) -> float:
    """The error of the first rows relative to float32."""
    out = torch.full((len(x), weight.rows), torch.nan, dtype=x.dtype, device="cuda")
    run(x, weight, out)
    if exact is None:
        exact = exact_rows(x, weight)
    error = float((out[:64].float() - exact).norm() / exact.norm())
    assert error < 4e-3, (x.shape, weight.shape, error)
    return error


def exact_rows(x: torch.Tensor, weight: Int4) -> torch.Tensor:
    return x[:64].float() @ weight.dequantized().float().t()


def us(x: torch.Tensor, weights: list[Any], run: Run, times: int) -> float:
    """Microseconds of a product."""
    out = torch.empty((len(x), len(weights[0])), dtype=x.dtype, device="cuda")
    return graph_us(lambda: [run(x, weight, out) for weight in weights], len(weights), times)


def swept(x: torch.Tensor, weights: list[Int4]) -> list[tuple[float, Tile, int]]:
    """Microseconds of each tile and number of programs that K is divided among, the fastest first."""
    tokens, (columns, depth), exact = len(x), weights[0].shape, exact_rows(x, weights[0])
    found: list[tuple[float, Tile, int]] = []
    rows = next((most for most in TILES if tokens <= most), 128)
    for across, *more in TILES[rows]:
        tile = Tile(rows, across, WIDTH, *more)
        tiles = triton.cdiv(columns, across) * triton.cdiv(tokens, rows)
        for splits in SPLITS:
            if splits > 1 and (tiles * splits > 8 * num_sms(x.device) or splits * WIDTH > depth):
                continue
            run = by_tile(tile, splits)
            try:
                check(x, weights[0], run, exact)
                found.append((us(x, weights, run, 7), tile, splits))
            except Exception as problem:  # too much shared memory, or too many registers
                print(f"    {tile} {splits}: {type(problem).__name__} {str(problem)[:100]}", flush=True)
    return sorted(found, key=lambda one: one[0])


def swept_hopper(kernel: ModuleType, x: torch.Tensor, weights: list[Int4]) -> list[tuple[float, Any, int]]:
    """The same, of the kernel for Hopper."""
    columns, depth = weights[0].shape
    found: list[tuple[float, Any, int]] = []
    for kind in kernel.KINDS:
        if not len(x) / 16 <= kind.tokens <= 2 * len(x):
            continue
        for splits in range(1, kernel.MAX_SPLITS + 1):
            tiles = triton.cdiv(columns, kernel.ROWS) * triton.cdiv(len(x), kind.tokens)
            if splits == 1 or tiles * splits <= kernel.MAX_PARTS:
                run = by_kind(kernel, kind, splits)
                found.append((us(x, weights, run, 5), kind, splits))
    return sorted(found, key=lambda one: one[0])


def by_kind(kernel: ModuleType, kind: Any, splits: int) -> Run:
    return lambda x, weight, out: kernel.multiply(x, weight, out, kind, splits)


def by_tile(tile: Tile, splits: int) -> Run:
    return lambda x, weight, out: int4.multiply(x, weight, out, tile, splits)


def print_swept(
    name: str, x: torch.Tensor, wide: list[torch.Tensor], packed: list[Int4], limits: dict[str, float]
) -> None:
    least = max(packed[0].nbytes / limits["copy_gbs"] / 1e3, 2 * len(x) * packed[0].numel() / limits["tflops"] / 1e6)
    print(name, len(x), f"bf16 {us(x, wide, plain, 7):.2f} us, limit {least:.2f}", flush=True)
    best = swept(x, packed)
    for one, tile, splits in best[:6]:
        print(f"    {one:.2f}", (tile.rows, tile.columns, tile.warps, tile.stages), splits, flush=True)
    if len(x) <= 64:
        run = by_tile(*best[0][1:])
        print(f"    {us(x, packed[:1] * len(packed), run, 7):.2f} the same weight again", flush=True)
        print_with(int4, "AHEAD", AHEAD, lambda: us(x, packed, run, 7))
    if len(x) >= 64:
        check(x, packed[0], dequant.by_torch)
        chunks = dequant.CHUNK, *CHUNKS
        print_with(dequant, "CHUNK", chunks, lambda: us(x, packed[:4], dequant.by_torch, 7))


def print_with(module: ModuleType, name: str, values: tuple[int, ...], time_us: Callable[[], float]) -> None:
    """The time with other values of a module's constant."""
    before = getattr(module, name)
    for value in values:
        setattr(module, name, value)
        print(f"    {time_us():.2f} {name} {value}", flush=True)
    setattr(module, name, before)


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
    if (kernel := int4.hopper_kernel(64, x.device, x.dtype)) and len(x) >= FEWEST:
        plan = kernel.plan(len(x), *packed[0].shape, num_sms(x.device))
        check(x, packed[0], lambda *a: kernel.multiply(*a, *plan))
        row |= {"hopper_us": us(x, packed, lambda *a: kernel.multiply(*a, *plan), 15)}
    if (found := int4.plan_for(len(x), *packed[0].shape, x.device)) is not None:
        row |= {"tile_us": us(x, packed, by_tile(*found), 15)}
    row |= {"dequantized_us": us(x, packed, dequant.by_torch, 9)} if len(x) >= 64 else {}
    row |= {
        f"{name}_limit_us": max(nbytes / limits["copy_gbs"] / 1e3, flops)
        for name, nbytes in (("bf16", wide[0].nbytes), ("int4", packed[0].nbytes))
    }
    return row | {"of_limit": row["int4_us"] / row["int4_limit_us"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--tiles", action="store_true", help="also all tiles of the kernel for Hopper")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing more after that")
    parser.add_argument("--tokens", type=int, nargs="*", default=None)
    parser.add_argument("--group", type=int, default=128)
    args = parser.parse_args()
    began = time.monotonic()
    torch.manual_seed(0)
    limits = ceilings()
    print(limits, flush=True)
    assert int4.there(torch.device("cuda"), torch.bfloat16)
    weights = {name: copies(shape, args.group) for name, shape in SHAPES.items()}
    rows: list[dict[str, Any]] = []
    for tokens in args.tokens or (SWEPT if args.sweep else TOKENS):
        for name, (wide, packed) in weights.items():
            if time.monotonic() - began > args.seconds:
                break
            x, few = drawn(tokens, SHAPES[name][1]), slice(None) if tokens <= 256 else slice(2)
            if args.sweep:
                print_swept(name, x, wide[few], packed[few], limits)
                continue
            rows.append({"product": name, "tokens": tokens} | measure(x, wide[few], packed[few], limits))
            print(rows[-1], flush=True)
            if args.tiles and (kernel := int4.hopper_kernel(64, x.device, x.dtype)):
                best = [f"{one:.1f} {kind.tokens} / {n}" for one, kind, n in swept_hopper(kernel, x, packed[few])]
                print("    tiles:", name, tokens, *best[:8], sep=", ", flush=True)
            save("packed_linear", rows, device=torch.cuda.get_device_name(), group=args.group, **limits)
    if rows:
        print(table(rows))


def copies(shape: tuple[int, int], group: int) -> tuple[list[torch.Tensor], list[Int4]]:
    """Weights that take turns, in bfloat16 and in INT4."""
    first = random_weight(*shape, group)
    packed = [first] + [random_weight(*shape, group) for _ in range(1, -(-CACHE // first.nbytes))]
    return [0.02 * drawn(*shape) for _ in range(max(2, -(-CACHE // (2 * first.numel()))))], packed


if __name__ == "__main__":
    main()
