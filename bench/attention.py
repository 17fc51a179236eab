"""Attention kernels compared, by phase, for one layer of a model's shape.

    python -m bench.attention [--sweep] [--heads 16 8 256]

Phases: decodes of B sequences with S cached tokens each; chunks of N new tokens after S cached ones. Kernels: this
project's Triton kernel over pages; FlashInfer's paged kernels (FA2); FlashInfer's FA3 over K and V that are first
gathered from the pages and converted to bf16 (the gather is timed as well); and the same with long prefixes split.
Limits: bytes over the copy bandwidth, or FLOPs over the rate of matrix products, both measured in the same run. The
error is relative to float32 over the same pages. With --sweep, also many variants of the Triton kernel. Other --heads
(query heads, KV heads, head size) have a result file of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from bench.common import save, table
from bench.worker import ceilings, median_ms
from radixrt.worker.cuda.attention import attend, kernel_checks, variants
from radixrt.worker.cuda.attention.attend import Scratch
from radixrt.worker.cuda.attention.chunks import PagedStep, Sequences
from radixrt.worker.cuda.attention.decodes import Cuts, DecodePlanner, Lists, SharedPrefixes, sharing_cost
from radixrt.worker.cuda.attention.pages import Pages
from radixrt.worker.cuda.attention.ragged import FlashInfer, RaggedStep
from radixrt.worker.cuda.attention.segments import Chip, SegmentStep, SharedKeys, cut_alone, cut_shared
from radixrt.worker.cuda.attention.step import DecodeLists, Kernels, StepAttention
from radixrt.worker.cuda.attention.variants import Shape, Variant
from radixrt.worker.cuda.attention.work import make_items, make_merges, sequence_tiles
from radixrt.worker.cuda.elementwise.staging import Packer
from radixrt.worker.execution.kv_pool import DTYPES

HEADS = 32, 8, 128
"""(query heads, KV heads, head size)."""
DEVICE = torch.device("cuda")
DECODES = [(1, 1024), (64, 1024), (256, 1024), (64, 4096), (8, 32768)]
CHUNKS = [
    (1, 128, 16384), (1, 600, 8192), (1, 2048, 8192), (1, 1024, 0), (1, 8192, 0), (1, 8192, 8192), (12, 600, 8192),
    (4, 600, 8192), (16, 64, 2048), (8, 1024, 0),
]  # fmt: skip


def in_graph(run: Callable[[], object]) -> Callable[[], object]:
    """Four calls as one CUDA graph, so that launches cost nothing."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            run()
    return graph.replay


def graph_ms(run: Callable[[], object]) -> float:
    return median_ms(in_graph(run)) / 4


def drawn(*size: int) -> torch.Tensor:
    return torch.randn(size, device=DEVICE, dtype=torch.bfloat16)


def limit_ms(shape: Shape, bytes_each: float, pairs: float, limits: dict[str, float]) -> float:
    """The limit of attention over `pairs` of a query and a key. `bytes_each`: bytes that the keys have per element of a
    head, summed over tokens."""
    moved = 2 * bytes_each * shape.kv_heads * shape.head_dim
    flops = 4 * pairs * shape.heads * shape.head_dim
    return max(moved / limits["copy_gbs"] / 1e6, flops / limits["tflops"] / 1e9)


class Forest:
    """Decodes of sequences that share prefixes, on random pages: a tree with levels of (tokens, fan-out), and `leaves`
    sequences below each of its lowest nodes, each with `own` tokens of its own (with `least`: from `least` to
    `own`)."""

    def __init__(
        self, shape: Shape, levels: list[tuple[int, int]], leaves: int, own: int, kv_dtype: str, least: int = 0
    ) -> None:
        self.shape = shape
        paths: list[list[tuple[int, int]]] = [[]]
        names = itertools.count(1)
        self.unique = 0
        for tokens, fan_out in levels:
            above, paths = paths, []
            for path in above:
                for _ in range(fan_out):
                    paths.append([*path, (next(names), (path[-1][1] if path else 0) + tokens)])
                    self.unique += tokens
        paths = [path for path in paths for _ in range(leaves)]
        self.batch = len(paths)
        shared = paths[0][-1][1]
        self.length = shared + own
        owns = np.random.default_rng(0).integers(least or own, own + 1, self.batch)
        self.unique += int(owns.sum())
        pages = torch.randperm(self.unique, device=DEVICE).int()
        # Rows of the page table are aligned as in a runner.
        width = -(-self.length // 16) * 16
        self.table = torch.empty((self.batch, width), dtype=torch.int32, device=DEVICE)
        taken: dict[int, tuple[int, int]] = {}
        used = 0
        for row, (path, own) in enumerate(zip(paths, owns.tolist(), strict=True)):
            begin = 0
            for name, end in path:
                if name not in taken:
                    taken[name] = used, used + end - begin
                    used += end - begin
                self.table[row, begin:end] = pages[slice(*taken[name])]
                begin = end
            self.table[row, shared : shared + own] = pages[used : used + own]
            used += own
        dtype = DTYPES[kv_dtype]
        self.keys, self.values = (drawn(self.unique, shape.kv_heads, shape.head_dim).to(dtype) for _ in range(2))
        self.q = drawn(self.batch, shape.heads, shape.head_dim)
        self.paths = [tuple(path) for path in paths]
        self.rows = np.arange(self.batch, dtype=np.int32)
        self.positions = (shared + owns - 1).astype(np.int32)
        self.out = torch.empty_like(self.q)

    def limit_ms(self, limits: dict[str, float]) -> float:
        return limit_ms(self.shape, self.unique * self.keys.element_size(), int(self.positions.sum()), limits)

    def error(self) -> float:
        """The larger relative error of the first and the last request."""
        worst = 0.0
        for row in (0, self.batch - 1):
            slots = self.table[row, : self.positions[row] + 1].long()
            k, v = (x[slots].float().transpose(0, 1)[None] for x in (self.keys, self.values))
            q = self.q[row : row + 1].float().transpose(0, 1)[None]
            expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1)
            found = self.out[row : row + 1].float()
            worst = max(worst, float((found - expected).norm() / expected.norm()))
        return worst

    def runner(self, many: Variant | None, flashinfer: FlashInfer | None = None) -> Callable[[], None]:
        """Tree attention, with the variant `many` for segments that many queries share, and with FlashInfer for large
        ones if given; without `many`, plain attention."""
        itemsize = self.keys.element_size()
        few = variants.decode_variant(self.shape, itemsize)
        wide = many or variants.shared_variant(self.shape, itemsize)
        kinds = self.shape, self.keys.dtype, torch.bfloat16, DEVICE
        cuts = Cuts(
            attend.best_tiling(few, *kinds, causal=False),
            attend.best_tiling(wide, *kinds, causal=False),
            sharing_cost(self.shape, itemsize, wide) if many else None,
            SharedPrefixes(Chip(self.shape.heads, 132), flashinfer.tokens) if flashinfer else None,
        )
        work = DecodePlanner({None}, cuts).plan((), self.paths, self.rows, self.positions, None)[None]
        packer = Packer(DEVICE)
        lists = Lists.pack(packer, work)
        shared_prefixes = None
        if len(work.shared_prefixes):
            decodes = Sequences(self.rows, self.positions, np.ones_like(self.rows), self.rows)
            shared_prefixes = SharedKeys(work.shared_prefixes, work.order, decodes, packer, flashinfer, 0, self.shape)
        elif flashinfer:
            raise ValueError("FlashInfer gets nothing")
        there = DecodeLists.of(lists, packer.send(), shared_prefixes)
        scratch = Scratch.make(work.few.partials + work.many.partials, self.shape, DEVICE)
        pages = Pages(self.keys, self.values, self.table, (1.0, 1.0), None)
        step = StepAttention(lambda _: pages, self.q, Kernels(self.shape, few, wide), {None: there}, scratch, [])
        return lambda: step.over_pages(0, self.q, self.out)


FORESTS = {
    "256, 16384, 256": ([(16384, 1)], 256, 256),
    "64, 8192, 512": ([(8192, 1)], 64, 512),
    "128, 2048, 1024": ([(2048, 1)], 128, 1024),
    "3k > 8 x 1k > 8 x 200 > 4, 128": ([(3000, 1), (1000, 8), (200, 8)], 4, 128),
    "8 pairs, 4096, 512": ([(4096, 8)], 2, 512),
    "3 x 6000 > 21, 2800": ([(6000, 3)], 21, 2800),
    "3 x 6000 > 21, 200 to 5000": ([(6000, 3)], 21, 5000, 200),
    "no sharing, 64 x 4096": ([(16, 64)], 1, 4080),
    "no sharing, 256 x 1024": ([(16, 256)], 1, 1008),
    "no sharing, 64 x 100 to 5000": ([(16, 64)], 1, 4984, 84),
    "no sharing, 200 x 100 to 3000": ([(16, 200)], 1, 2984, 84),
}


TAILS = {
    "32 tails of 128 on 16384": (32, 128, 16384),
    "64 tails of 128 on 16384": (64, 128, 16384),
    "16 tails of 512 on 4096": (16, 512, 4096),
    "64 tails of 64 on 2048": (64, 64, 2048),
}


def tail_rows(shape: Shape, limits: dict[str, float], flashinfer: FlashInfer) -> list[dict[str, Any]]:
    """Chunks after one shared prefix, which each reads alone, or all together."""
    rows = []
    for name, (batch, new, cached) in TAILS.items():
        case = Case(shape, batch, new, cached, "fp8_e4m3", shared=True)
        unique = (cached + batch * new) * case.keys.element_size()
        limit = limit_ms(shape, unique, batch * new * (cached + new / 2), limits)
        row: dict[str, Any] = {"tails": name, "limit_ms": limit}
        measure(case, limit, "alone", case.gathered(flashinfer), row)
        if special := kernel_checks.find_specialised(case.shape, case.keys.dtype, torch.bfloat16, DEVICE):
            measure(case, limit, "specialised", case.triton(special, False), row)
        with contextlib.suppress(ValueError):
            measure(case, limit, "together", case.together(flashinfer), row)
        row["of_limit"] = min(ms for name, ms in row.items() if name.endswith("_ms") and name != "limit_ms") / limit
        rows.append(row)
        print(row, flush=True)
    return rows


def forest_rows(
    shape: Shape, limits: dict[str, float], sweep: bool, flashinfer: FlashInfer | None
) -> list[dict[str, Any]]:
    rows = []
    for (name, (levels, leaves, own, *least)), kv_dtype in product(FORESTS.items(), ("fp8_e4m3", "bfloat16")):
        forest = Forest(shape, levels, leaves, own, kv_dtype, *least)
        row: dict[str, Any] = {"tree": name, "pages": kv_dtype, "limit_ms": forest.limit_ms(limits)}
        chosen = variants.shared_variant(forest.shape, forest.keys.element_size())
        ways = {"plain": forest.runner(None), "tree": forest.runner(chosen)}
        if special := kernel_checks.find_specialised(forest.shape, forest.keys.dtype, torch.bfloat16, DEVICE):
            ways["specialised"] = forest.runner(special)
        if flashinfer is not None:
            with contextlib.suppress(ValueError):
                ways["trunk_fa3"] = forest.runner(chosen, flashinfer=flashinfer)
        for way, run in ways.items():
            forest.out.fill_(torch.nan)
            run()
            error = forest.error()
            assert error < 2e-2, f"{name} {way}: {error}"
            row[f"{way}_ms"] = graph_ms(run)
        taken = row.get("specialised_ms", row.get("trunk_fa3_ms", row["tree_ms"]))
        row["of_limit"] = taken / row["limit_ms"]
        if sweep and "no" not in name and kv_dtype == "fp8_e4m3":
            found = []
            for rows_, keys, warps, stages in product((64, 128, 256), (64, 128), (4, 8), (2, 3)):
                variant = Variant(rows_, keys, warps, stages)
                try:
                    found.append((graph_ms(forest.runner(variant)), variant))
                except Exception:  # too much shared memory
                    continue
            found.sort(key=lambda one: one[0])
            print(name, kv_dtype, *(f"\n    {ms:.4f} {v}" for ms, v in found[:6]), flush=True)
        rows.append(row)
        print(row, flush=True)
    return rows


class Case:
    """`batch` sequences of `cached` tokens followed by `new` ones, on random pages."""

    def __init__(self, shape: Shape, batch: int, new: int, cached: int, kv_dtype: str, shared: bool = False) -> None:
        self.shape, page_size = shape, shape.page_size
        length = cached + new
        pages = -(-length // page_size)
        slots = batch * pages * page_size
        dtype = DTYPES[kv_dtype]
        self.keys, self.values = (drawn(slots, shape.kv_heads, shape.head_dim).to(dtype) for _ in range(2))
        self.table = torch.randperm(batch * pages, device=DEVICE).int().view(batch, pages)
        if shared:
            self.table[:, :cached] = self.table[0, :cached].clone()
        self.q = drawn(batch * new, shape.heads, shape.head_dim)
        self.out = torch.empty_like(self.q)
        self.batch, self.new, self.cached, self.page_size = batch, new, cached, page_size
        self.rows = np.arange(batch, dtype=np.int32)
        self.starts = np.full(batch, cached, dtype=np.int32)
        self.counts = np.full(batch, new, dtype=np.int32)
        self.sequences = Sequences(self.rows, self.starts, self.counts, self.rows * new)
        self.pages = Pages(self.keys, self.values, self.table, (1.0, 1.0), None)

    def limit_ms(self, limits: dict[str, float]) -> float:
        unique = self.batch * (self.cached + self.new) * self.keys.element_size()
        pairs = self.batch * (self.new * self.cached + self.new * (self.new + 1) / 2)
        return limit_ms(self.shape, unique, pairs, limits)

    def error(self) -> float:
        """The relative error of the last 16 queries of the first sequence."""
        length, last = self.cached + self.new, min(16, self.new)
        at = torch.arange(length, device=DEVICE)
        slots = self.table[0, at // self.page_size].long() * self.page_size + at % self.page_size
        k, v = (x[slots].float().transpose(0, 1)[None] for x in (self.keys, self.values))
        q = self.q[self.new - last : self.new].float().transpose(0, 1)[None]
        mask = at <= torch.arange(length - last, length, device=DEVICE)[:, None]
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
        found = self.out[self.new - last : self.new].float()
        return float((found - expected).norm() / expected.norm())

    def triton(self, variant: Variant, decode: bool) -> Callable[[], None]:
        packer = Packer(DEVICE)
        tiling = attend.best_tiling(variant, self.shape, self.keys.dtype, torch.bfloat16, DEVICE, causal=not decode)
        if not decode:
            step = PagedStep(self.sequences, {None}, packer, self.shape, variant, tiling)
            step.sent(packer.send())
            return lambda: step.run(self.q, self.pages, self.out)
        items, _ = make_items(sequence_tiles(self.rows, self.starts, self.counts, self.rows, None, 1), tiling)
        merges = make_merges([items.items])
        pieces = [packer.add(x) for x in (items.items, items.starts, merges.queries, merges.entries)]
        sent = packer.send()
        scratch = Scratch.make(merges.partials, self.shape, DEVICE)
        there, starts, queries, entries = (piece.of(sent) for piece in pieces)
        work = there, starts

        def run() -> None:
            attend.attend(
                self.q, self.keys, self.values, self.table, work, self.out, scratch, self.shape, variant, causal=False
            )
            attend.merge(scratch.partials, queries, entries, self.out, self.shape)

        return run

    def gathered(self, flashinfer: FlashInfer) -> Callable[[], None]:
        packer = Packer(DEVICE)
        step = RaggedStep(self.sequences, {None}, packer, flashinfer, 0, self.page_size)
        step.sent(packer.send())
        return lambda: step.run(self.q, self.pages, self.out)

    def split(self, flashinfer: FlashInfer) -> Callable[[], None]:
        cut = cut_alone(self.sequences, Chip(self.shape.heads, 132), flashinfer.tokens)
        if cut is None:
            raise ValueError("is not cut")
        packer = Packer(DEVICE)
        step = SegmentStep(self.sequences, cut, packer, flashinfer, 0, self.shape)
        step.sent(packer.send())
        return lambda: step.run(self.q, self.pages, self.out)

    def together(self, flashinfer: FlashInfer) -> Callable[[], None]:
        paths = [((1, self.cached),)] * self.batch
        chip, itemsize = Chip(self.shape.heads, 132), self.keys.element_size()
        cut = cut_shared(paths, self.sequences, self.shape, itemsize, chip, flashinfer.tokens, 1 << 20)
        if cut is None:
            raise ValueError("sharing does not pay")
        packer = Packer(DEVICE)
        step = SegmentStep(self.sequences, cut, packer, flashinfer, 0, self.shape)
        step.sent(packer.send())
        return lambda: step.run(self.q, self.pages, self.out)

    def fa2(self) -> Callable[[], object]:
        import flashinfer

        buffer = torch.empty(512 << 20, dtype=torch.uint8, device=DEVICE)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(buffer, kv_layout="NHD", backend="fa2")
        held = -(-(self.starts + self.counts) // self.page_size)
        wrapper.plan(
            qo_indptr=_starts(self.counts),
            paged_kv_indptr=_starts(held),
            paged_kv_indices=self.table.flatten(),
            paged_kv_last_page_len=torch.from_numpy(self.starts + self.counts - (held - 1) * self.page_size).int(),
            num_qo_heads=self.shape.heads,
            num_kv_heads=self.shape.kv_heads,
            head_dim_qk=self.shape.head_dim,
            page_size=self.page_size,
            causal=True,
            q_data_type=torch.bfloat16,
            kv_data_type=self.keys.dtype,
        )
        cache = tuple(x.unflatten(0, (-1, self.page_size)) for x in (self.keys, self.values))
        return lambda: wrapper.run(self.q, cache, out=self.out)


def _starts(counts: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))


def measure(case: Case, limit: float, name: str, run: Callable[[], object], row: dict[str, Any]) -> None:
    case.out.fill_(torch.nan)
    run()
    error = case.error()
    assert error < 2e-2, f"{name}: {error}"
    row[f"{name}_ms"] = graph_ms(run)


def worth_a_try(shape: Shape, decode: bool) -> list[Variant]:
    if decode:
        rows = variants.decode_variant(shape, 1).rows
        tiles = product((16, 32, 64, 128), (1, 2, 4), (2, 3, 4))
        return [Variant(rows, keys, warps, stages) for keys, warps, stages in tiles]
    return [
        Variant(rows, keys, warps, stages)
        for rows, keys, warps, stages in product((64, 128), (64, 128), (4, 8), (2, 3))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--only-trees", action="store_true")
    parser.add_argument("--heads", nargs=3, type=int, default=HEADS, metavar=("QUERIES", "KV", "SIZE"))
    parser.add_argument("--no-flashinfer", action="store_true", help="whose kernels take minutes to build")
    args = parser.parse_args()
    limits = ceilings()
    print(limits, flush=True)
    shape = Shape(*args.heads, page_size=1)
    flashinfer = None if args.no_flashinfer else FlashInfer(shape, torch.bfloat16, DEVICE, 1 << 17, "fa3")
    trees = forest_rows(shape, limits, args.sweep, flashinfer)
    print(table(trees), flush=True)
    tails: list[dict[str, Any]] = []
    if flashinfer is not None:
        tails = tail_rows(shape, limits, flashinfer)
        print(table(tails), flush=True)
    if args.only_trees:
        return
    rows: list[dict[str, Any]] = []
    kinds = [("decode", batch, 1, cached - 1) for batch, cached in DECODES]
    kinds += [("chunk", batch, new, cached) for batch, new, cached in CHUNKS]
    for (phase, batch, new, cached), kv_dtype, page_size in product(kinds, ("fp8_e4m3", "bfloat16"), (1, 16)):
        if page_size == 16 and (batch, cached + new) not in ((256, 1024), (1, 16384)):
            continue
        case = Case(replace(shape, page_size=page_size), batch, new, cached, kv_dtype)
        decode = phase == "decode"
        limit = case.limit_ms(limits)
        row: dict[str, Any] = {
            "phase": f"{phase} {batch} x {new} on {cached + decode - 1 + (not decode)}",
            "pages": f"{kv_dtype} {page_size}",
            "limit_ms": limit,
        }
        pick = variants.decode_variant if decode else variants.chunk_variant
        chosen = pick(case.shape, case.keys.element_size())
        measure(case, limit, "triton", case.triton(chosen, decode), row)
        ways: dict[str, Callable[[], Callable[[], object]]] = {"fa2": case.fa2} if flashinfer else {}
        if not decode and flashinfer:
            ways["fa3"] = partial(case.gathered, flashinfer)
            ways["fa3_split"] = partial(case.split, flashinfer)
        if not decode:
            if special := kernel_checks.find_specialised(case.shape, case.keys.dtype, torch.bfloat16, DEVICE):
                ways["specialised"] = partial(case.triton, special, False)
        for name, make in ways.items():
            try:
                measure(case, limit, name, make(), row)
            except Exception as problem:
                row[f"{name}_ms"] = f"{type(problem).__name__}"
        if args.sweep and page_size == 1:
            found = []
            for variant in worth_a_try(case.shape, decode):
                try:
                    found.append((graph_ms(case.triton(variant, decode)), variant))
                except Exception:  # too much shared memory
                    continue
            found.sort(key=lambda one: one[0])
            print(row["phase"], row["pages"], *(f"\n    {ms:.4f} {v}" for ms, v in found[:5]), flush=True)
            row["best_ms"] = found[0][0]
        rows.append(row)
        print(row, flush=True)
    print(table(rows))
    if not args.sweep:
        name = "_".join(["attention", *(map(str, args.heads) if tuple(args.heads) != HEADS else ())])
        save(name, rows, trees=trees, tails=tails, device=torch.cuda.get_device_name(), **limits)


if __name__ == "__main__":
    main()
