"""Sequences that share pages as the paths of a random tree share nodes."""

from __future__ import annotations

import random

import numpy as np
import torch

from radixrt.worker.cuda.attention.attend import Scratch
from radixrt.worker.cuda.attention.chunks import Sequences
from radixrt.worker.cuda.attention.decodes import Cuts, DecodePlanner, Lists
from radixrt.worker.cuda.attention.pages import Pages
from radixrt.worker.cuda.attention.segments import SharedKeys
from radixrt.worker.cuda.attention.step import DecodeLists, Kernels, StepAttention
from radixrt.worker.cuda.attention.variants import Shape
from radixrt.worker.cuda.elementwise.staging import Packer
from radixrt.worker.execution.attention import TorchAttention
from radixrt.worker.execution.kv_pool import KVPool
from radixrt.worker.plan import Plan

CPU = torch.device("cpu")
SMALL = Shape(4, 2, 16, 1)


class Forest:
    """Random sequences: up to `most`, on paths of up to `depth` nodes with one of `lengths` pages each. Each sequence
    has at least `least` tokens followed by one of `new` numbers of tokens to compute. With `sinks`, there are random
    attention sinks."""

    def __init__(
        self, seed: int, new: tuple[int, ...], *, shape: Shape = SMALL, least: int = 0, fan_out: int = 3,
        depth: int = 4, most: int = 7, lengths: tuple[int, ...] = (1, 5, 20, 40), dtype: torch.dtype = torch.float32,
        pages: torch.dtype = torch.float8_e4m3fn, device: torch.device = CPU, sinks: bool = False,
    ) -> None:  # fmt: skip
        rng = random.Random(seed)
        self.shape = shape
        size = shape.page_size
        paths: list[tuple[tuple[int, int], ...]] = [()]
        name = 0
        for path in paths:
            if len(path) < rng.randint(1, depth) and len(paths) < most:
                for _ in range(rng.randint(1, fan_out)):
                    name += 1
                    paths.append((*path, (name, (path[-1][1] if path else 0) + size * rng.choice(lengths))))
        self.paths = rng.choices(paths, k=rng.randint(2, most))
        self.starts = np.array([p[-1][1] if p else 0 for p in self.paths]) + [rng.randint(least, 9) for _ in self.paths]
        self.counts = np.array([rng.choice(new) for _ in self.paths])
        held = -(-(self.starts + self.counts) // size)
        fresh = rng.sample(range(1, int(held.sum()) + 1), int(held.sum()))
        self.table = np.zeros((len(self.paths), int(held.max())), dtype=np.int32)
        taken: dict[int, list[int]] = {}
        for row, path in enumerate(self.paths):
            begin = 0
            for node, end in path:
                if node not in taken:
                    taken[node] = [fresh.pop() for _ in range((end - begin) // size)]
                self.table[row, begin // size : end // size] = taken[node]
                begin = end
            self.table[row, begin // size : held[row]] = [fresh.pop() for _ in range(held[row] - begin // size)]
        self.rows = np.arange(len(self.paths), dtype=np.int32)
        generator = torch.Generator().manual_seed(seed)
        self.pool = KVPool(1, (int(held.sum()) + 1) * size, shape.kv_heads, shape.head_dim, pages, device)
        if pages.itemsize == 1:
            self.pool.scales[0] = (0.5, 2.0)
        kv = torch.randn(2, self.pool.slots, shape.kv_heads, shape.head_dim, generator=generator).to(device)
        self.pool.write(0, torch.arange(self.pool.slots, device=device), *kv)
        q = torch.randn(int(self.counts.sum()), shape.heads, shape.head_dim, generator=generator)
        self.q = q.to(device, dtype)
        keys, values = (x.flatten(0, 1) for x in self.pool.pages(0, size))
        self.sinks = torch.randn(shape.heads, generator=generator).mul(2).to(device) if sinks else None
        there = torch.from_numpy(self.table).to(device)
        self.pages = Pages(keys, values, there, self.pool.scales[0], None, self.sinks)

    @property
    def sequences(self) -> Sequences:
        return Sequences(self.rows, self.starts, self.counts, np.cumsum(self.counts) - self.counts)

    def expected(self) -> torch.Tensor:
        """The result of attention in float32, by the reference implementation."""
        ones, none = np.ones(len(self.rows), dtype=np.int32), np.zeros((3, 0), dtype=np.int32)
        ids = np.zeros(len(self.q), dtype=np.int32)
        starts, counts = self.starts.astype(np.int32), self.counts.astype(np.int32)
        plan = Plan(1, (), self.rows, starts, counts, ids, ids, ones, ones.astype(bool), none)
        reference = TorchAttention(self.pool, self.shape.page_size, (None,), sinks=(self.sinks,))
        reference.bind(self.table)
        return reference.begin(plan, self.q.device).over_pages(0, self.q.float())

    def decode(self, cuts: Cuts, kernels: Kernels, flashinfer) -> tuple[torch.Tensor, DecodePlanner, bool]:
        """Run one step of decodes, whose plan is derived from that of the step before. Returns (output, planner,
        whether FlashInfer was used)."""
        planner = DecodePlanner({None}, cuts)
        planner.plan((), self.paths, self.rows, self.starts - 1, None)
        work = planner.plan((), self.paths, self.rows, self.starts, None)[None]
        packer = Packer(self.q.device)
        lists = Lists.pack(packer, work)
        shared_prefixes = None
        if len(work.shared_prefixes):
            shared_prefixes = SharedKeys(
                work.shared_prefixes, work.order, self.sequences, packer, flashinfer, 0, self.shape
            )
        there = {None: DecodeLists.of(lists, packer.send(), shared_prefixes)}
        scratch = Scratch.make(work.few.partials + work.many.partials, self.shape, self.q.device)
        out = torch.full_like(self.q, torch.nan)
        StepAttention(lambda _: self.pages, self.q, kernels, there, scratch, []).over_pages(0, self.q, out)
        return out, planner, shared_prefixes is not None
