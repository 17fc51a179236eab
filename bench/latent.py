"""Latent attention, for one layer: decodes and chunks with 16 and 128 heads, bf16 and FP8 pages. Chunks in both forms:
absorbed, over pages; and with full heads, including the products that compute keys and values from latents.

    python -m bench.latent [--sweep]

Limits: the pages' bytes over the copy bandwidth, or FLOPs over the rate of matrix products, both measured in the same
run, whichever takes longer. The error is that of a few queries, relative to float32 over the same pages; nothing is
timed whose error is too large. With --sweep, many variants of the kernel are timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
import triton

from bench.attention import graph_ms
from bench.common import save, table
from bench.full_heads import FullCase
from bench.worker import ceilings
from radixrt.worker.cuda.attention import attend, variants
from radixrt.worker.cuda.attention.attend import Scratch
from radixrt.worker.cuda.attention.variants import Shape, Variant
from radixrt.worker.cuda.attention.work import make_items, make_merges, sequence_tiles
from radixrt.worker.cuda.latent import latent
from radixrt.worker.execution.kv_pool import DTYPES

RANK, ROPE, SCALE = 512, 64, 192**-0.5
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Load:
    """`batch` sequences of `cached` tokens followed by `new` ones."""

    heads: int
    batch: int
    new: int
    cached: int

    @property
    def name(self) -> str:
        kind = (
            f"decodes {self.batch} x {self.cached + 1}" if self.new == 1
            else f"{self.batch} x {self.new} on {self.cached}"
        )  # fmt: skip
        return f"{self.heads} heads, {kind}"


LOADS = [
    Load(16, 64, 1, 1023), Load(16, 64, 1, 4095), Load(16, 1, 1, 4095), Load(16, 256, 1, 1023),
    Load(16, 1, 32, 16384), Load(16, 1, 64, 16384), Load(16, 1, 128, 16384), Load(16, 8, 128, 2048),
    Load(16, 1, 256, 0), Load(16, 1, 600, 8192), Load(16, 1, 8192, 0), Load(128, 64, 1, 4095), Load(128, 1, 32, 4096),
    Load(128, 1, 128, 4096), Load(128, 1, 2048, 2048),
]  # fmt: skip
SWEEP = [Load(16, 64, 1, 1023), Load(16, 64, 1, 4095), Load(16, 1, 8192, 0), Load(128, 64, 1, 4095)]


class Case:
    """The tensors of a load, on random pages."""

    def __init__(self, load: Load, kv_dtype: str) -> None:
        self.load = load
        self.shape = Shape(load.heads, 1, RANK + ROPE, 1, RANK, SCALE)
        length = load.cached + load.new
        self.length, slots = length, load.batch * length
        generator = torch.Generator(DEVICE).manual_seed(0)
        keys = torch.randn(slots, 1, RANK + ROPE, generator=generator, device=DEVICE, dtype=torch.bfloat16)
        self.keys = keys.to(DTYPES[kv_dtype])
        width = -(-length // 16) * 16
        self.table = torch.zeros((load.batch, width), dtype=torch.int32, device=DEVICE)
        self.table[:, :length] = torch.randperm(slots, generator=generator, device=DEVICE).view(load.batch, -1)
        size = load.batch * load.new, load.heads, RANK + ROPE
        self.q = torch.randn(size, generator=generator, device=DEVICE, dtype=torch.bfloat16)
        self.narrow = self.q.to(latent.multiplied(self.keys.dtype))
        self.out = torch.zeros((*size[:2], RANK), device=DEVICE, dtype=torch.bfloat16)

    def limit_ms(self, limits: dict[str, float]) -> float:
        load = self.load
        pairs = load.batch * (load.new * load.cached + load.new * (load.new + 1) / 2)
        flops = 2 * pairs * load.heads * (2 * RANK + ROPE)
        return max(self.keys.nbytes / limits["copy_gbs"] / 1e6, flops / limits["tflops"] / 1e9)

    def error(self) -> float:
        """The largest relative error of the first, the last and some other queries."""
        load, worst = self.load, 0.0
        for at in sorted({0, load.new // 2, load.batch * load.new // 3, load.batch * load.new - 1}):
            row, position = at // load.new, load.cached + at % load.new
            k = self.keys[self.table[row, : position + 1].long(), 0].float()
            weights = (self.q[at].float() @ k.t() * SCALE).softmax(-1)
            expected = weights @ k[:, :RANK]
            worst = max(worst, float((self.out[at].float() - expected).norm() / expected.norm()))
        return worst

    def runner(self, variant: Variant) -> Callable[[], None]:
        load, shape, chunk = self.load, self.shape, self.load.new > 1
        cut = attend.best_tiling(variant, shape, self.keys.dtype, torch.bfloat16, DEVICE, causal=chunk)
        rows = np.arange(load.batch)
        starts, counts = np.full(load.batch, load.cached), np.full(load.batch, load.new)
        tiles = sequence_tiles(rows, starts, counts, rows * load.new, None, cut.queries if chunk else 1)
        items, _ = make_items(tiles, cut)
        merges = make_merges([items.items])
        list, starts_there, queries, entries = (
            x if x is None else torch.from_numpy(x).to(DEVICE)
            for x in (items.items, items.starts, merges.queries, merges.entries)
        )
        scratch = Scratch.make(merges.partials, shape, DEVICE)

        def run() -> None:
            attend.attend(
                self.narrow, self.keys, self.keys, self.table, (list, starts_there), self.out, scratch, shape, variant,
                causal=chunk,
            )  # fmt: skip
            attend.merge(scratch.partials, queries, entries, self.out, shape)

        return run


def chosen(case: Case) -> Variant:
    choose = variants.decode_variant if case.load.new == 1 else variants.chunk_variant
    return choose(case.shape, case.keys.element_size())


def worth_a_try(case: Case) -> list[Variant]:
    """Candidate variants of the kernel."""
    wide = [Variant(64, 64, 8, stages) for stages in (1, 2, 3)]
    if case.load.new == 1 and case.load.heads == 16:
        return wide + [Variant(16, *tile) for tile in ((64, 4, 2), (64, 4, 3), (64, 8, 2), (32, 4, 3), (128, 8, 2))]
    return wide


def measure(case: Case, variant: Variant, limits: dict[str, float]) -> dict[str, Any]:
    run = case.runner(variant)
    case.out.zero_()
    run()
    error = case.error()
    assert error < 2e-2, (case.load, variant, error)
    ms, limit = graph_ms(run), case.limit_ms(limits)
    tile = f"{variant.rows} x {variant.keys}, {variant.warps} warps, {variant.stages} stages"
    return {"ms": ms, "limit": limit, "ratio": ms / limit, "error": error, "tile": tile}


def measure_full(load: Load, kv_dtype: str, limits: dict[str, float]) -> dict[str, Any]:
    """A row of the table for full heads."""
    case = FullCase(load.heads, load.batch, load.new, load.cached, kv_dtype)
    full = case.workspace()
    run = case.runner(full)
    run["ms"]()
    error = case.error()
    assert error < 2e-2, (load, error)
    parts, limit = {name: graph_ms(part) for name, part in run.items()}, case.limit_ms(limits["tflops"])
    row = {"form": "full heads", "ms": parts["ms"], "limit": limit, "ratio": parts["ms"] / limit, "error": error}
    return row | {"tile": "Hopper's" if full.variant.specialised else str(full.variant)} | {
        "gathered_ms": parts["gather"], "products_ms": parts["products"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    limits = ceilings()
    rows = []
    for load, kv_dtype in product(SWEEP if args.sweep else LOADS, ("bfloat16", "fp8_e4m3")):
        case = Case(load, kv_dtype)
        for variant in worth_a_try(case) if args.sweep else [chosen(case)]:
            row = {"what": load.name, "pages": kv_dtype, "form": "absorbed"}
            try:
                rows.append(row | measure(case, variant, limits))
            except (triton.runtime.errors.OutOfResources, AssertionError) as failed:
                rows.append(row | {"tile": f"{variant}: {str(failed)[:80]}"})
            print(rows[-1], flush=True)
        del case
        if load.new > 1 and not args.sweep:
            rows.append({"what": load.name, "pages": kv_dtype} | measure_full(load, kv_dtype, limits))
            print(rows[-1], flush=True)
    print(table(rows))
    if not args.sweep:
        save("latent", rows, device=torch.cuda.get_device_name(), **limits)


if __name__ == "__main__":
    main()
