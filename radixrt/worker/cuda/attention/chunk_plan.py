"""Decides which kernels compute each chunk of a step (see `chunks`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from radixrt.worker.cuda.attention.chunks import ChunkStep, LastLayers, PagedStep, Sequences
from radixrt.worker.cuda.attention.decodes import DecodeWork
from radixrt.worker.cuda.attention.ragged import FlashInfer, RaggedStep
from radixrt.worker.cuda.attention.segments import Chip, SegmentStep, SharedKeys, cut_alone, cut_shared
from radixrt.worker.cuda.attention.variants import Shape, Variant
from radixrt.worker.cuda.attention.work import Tiling
from radixrt.worker.cuda.elementwise.staging import Packer
from radixrt.worker.cuda.latent.full_chunks import FullHeads, FullStep
from radixrt.worker.execution.prefix_sharing import path_before
from radixrt.worker.model.spec.spec import LatentSpec
from radixrt.worker.plan import Plan

LAST_LAYER = 4
"""In the last layer, attention is computed only for tokens whose logits are wanted, if the chunks have at least this
many times as many tokens."""


def few_wanted(counts: np.ndarray, wants: np.ndarray) -> bool:
    """Whether logits of so few tokens of chunks are wanted that last layers are computed for these alone, for int[N]
    tokens and wanted logits."""
    return counts.sum() >= LAST_LAYER * wants.sum()


@dataclass(frozen=True, slots=True)
class FlashInferOrTriton:
    """Decides which chunks FlashInfer computes rather than the kernel of `attend` (bench/attention.py)."""

    queries: int = 256
    """Chunks of at least this many tokens."""
    pairs: int = 1 << 20
    """Chunks of at least this many pairs of a query and a key."""
    shared: int = 1 << 20
    """Chunks that together share at least this many pairs."""

    def long(self, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """bool[N]: which chunks, of int64 counts[N] tokens after int64 starts[N] others, FlashInfer computes."""
        return (counts >= self.queries) | (counts * (starts + counts) >= self.pairs)


@dataclass(frozen=True, slots=True)
class FlashInferOrHopper:
    """Decides which chunks FlashInfer computes rather than the kernel of `hopper`. That kernel reads pages in place, so
    gathering keys for FlashInfer pays only with many queries per key. Costs are in pairs of a query and a key, of which
    FlashInfer computes 39 million per millisecond with 32 heads of 128 on an H200."""

    shape: Shape
    shared: int = 1 << 25
    slower: float = 1.29
    """Time of a pair by the kernel of `hopper`, relative to FlashInfer's."""
    edge: int = 250
    """Masked keys that the kernel of `hopper` computes for each query, in partly masked blocks."""
    gathered: float = 79.0
    """Cost of gathering a key, with 4 heads per KV head."""
    launch: float = 1.6e6
    """Fixed cost of FlashInfer in a step, with 32 heads of 128."""

    def long(self, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """See FlashInferOrTriton."""
        keys, pairs = starts + counts, counts * (starts + counts / 2)
        gain = self.slower * (pairs + self.edge * counts) - pairs - self.gathered * 4 / self.shape.group * keys
        worth = gain > 0
        launch = self.launch * 4096 / (self.shape.heads * self.shape.head_dim)
        return worth if gain[worth].sum() > launch else np.zeros_like(worth)


@dataclass(frozen=True, slots=True)
class FullOrAbsorbed:
    """Decides which chunks of latent attention are computed by full heads (`full_heads`) rather than over pages, in the
    absorbed form (`latent`). Rates are those of an H200 (bench/latent.py), in FLOPs per nanosecond."""

    heads: int
    latent: LatentSpec
    itemsize: int
    """Bytes of a page's element."""
    absorbed: tuple[float, float] = (175e3, 205e3)
    """Rates of the absorbed form over FP8 pages and over others, for chunk lengths at which both forms are close."""
    full: float = 500e3
    """Rate of attention by full heads."""
    products: float = 550e3
    """Rate of the matrix products that compute keys and values from latents."""
    rows: int = 128
    """Queries of a tile."""
    key: float = 0.5
    """Nanoseconds that a key takes to gather."""
    launch: float = 15e3
    """Nanoseconds that the additional launches take."""

    def long(self, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """bool[N]: which chunks, of int64 counts[N] tokens after int64 starts[N] others, full heads compute."""
        latent, pairs = self.latent, counts * (starts + counts / 2)
        each = latent.nope_dim + latent.value_dim
        absorbed = 2 * (2 * latent.rank + latent.rope_dim) / self.absorbed[self.itemsize > 1] * pairs
        filled = -(-counts // self.rows) * self.rows / counts
        full = 2 * (each + latent.rope_dim) / self.full * pairs * filled
        # Cached keys only: computing keys and values of the new tokens costs as much as is saved by not absorbing their
        # queries.
        out = 2 * latent.rank * each / self.products * starts
        gain = self.heads * (absorbed - full - out) - self.key * (starts + counts)
        worth = gain > 0
        return worth if gain[worth].sum() > self.launch else np.zeros_like(worth)


class ChunkPlanner:
    """Plans the attention of each step's chunks. `variant` and `cut` are those of the kernel over pages. `flashinfer`,
    if given, computes the chunks for which it is faster, and `full`, if given, long chunks of latent attention.
    `shares`: whether prefixes that chunks share are read once. `windows` are by layer; `plain` is that of PagedStep.
    `last`: the last layers, if they need be computed only for tokens whose logits are wanted: the place of the first
    one, among all layers that have attention, and their windows."""

    def __init__(
        self, shape: Shape, itemsize: int, windows: tuple[int | None, ...], variant: Variant, cut: Tiling, chip: Chip,
        flashinfer: FlashInfer | None, shares: bool, plain: tuple[Variant, Tiling] | None = None,
        full: FullHeads | None = None, last: tuple[int, set[int | None]] | None = None,
    ) -> None:  # fmt: skip
        self._shape = shape
        self._itemsize = itemsize
        self._last = last
        self._windows = set(windows)
        self._variant = variant
        self._cut = cut
        self._chip = chip
        self._flashinfer = flashinfer
        self._shares = shares
        self._plain = plain
        self._full = full
        self._by_full = None if full is None else FullOrAbsorbed(full.heads, full.latent, itemsize)
        specialised = (plain[0] if plain else variant).specialised
        self._bounds = FlashInferOrHopper(shape) if specialised else FlashInferOrTriton()

    @property
    def has_full(self) -> bool:
        """Whether chunks may be computed by full heads."""
        return self._full is not None

    def by_full_heads(self, plan: Plan, decodes: int) -> np.ndarray:
        """bool[N]: which of a step's N chunks, which follow its `decodes`, are computed by full heads."""
        starts, counts = (x[decodes:].astype(np.int64) for x in (plan.starts, plan.counts))
        if self._full is None or self._by_full is None or not len(starts):
            return np.zeros(len(starts), dtype=bool)
        long = np.zeros(len(starts), dtype=bool)
        fits = np.flatnonzero(starts + counts <= self._full.tokens)
        long[fits] = self._by_full.long(starts[fits], counts[fits])
        return long

    def plan_full(self, plan: Plan, decodes: int, long: np.ndarray, packer: Packer) -> tuple[FullStep, int]:
        """Returns (the attention of the `long` chunks, of which there must be at least one; how many of the step's
        first tokens are computed in the absorbed form: all up to the end of the last chunk that is not long)."""
        assert self._full is not None
        chunks = self._sequences(plan, decodes)
        last = np.flatnonzero(~long).max(initial=-1)
        absorbed = decodes if last < 0 else int(chunks.queries[last] + chunks.counts[last])
        return FullStep(chunks.take(np.flatnonzero(long)), packer, self._full), absorbed

    def _sequences(self, plan: Plan, decodes: int) -> Sequences:
        first = (np.cumsum(plan.counts) - plan.counts)[decodes:]
        return Sequences(plan.rows[decodes:], plan.starts[decodes:], plan.counts[decodes:], first)

    def plan(
        self, plan: Plan, decodes: int, packer: Packer, last_packer: Packer, parity: int,
        done: np.ndarray | None = None, narrow: bool = False,
    ) -> tuple[list[ChunkStep], LastLayers | None]:  # fmt: skip
        """Plan the chunks, which follow the step's `decodes`, except those that are `done` another way. Returns (their
        attention; that of the last layers if it differs, which will be packed by `last_packer`). At most one step of
        each `parity` may be in flight. `narrow`: queries of the last layers are only those of tokens whose logits are
        wanted; otherwise those of all tokens."""
        chunks = self._sequences(plan, decodes)
        first = chunks.queries
        if not len(chunks):
            return [], None
        left = np.arange(len(chunks)) if done is None else np.flatnonzero(~done)
        steps: list[ChunkStep] = []
        if self._flashinfer is not None:
            steps, left = self._with_flashinfer(plan, chunks, packer, parity)
        if len(left):
            steps.append(self._over_pages(chunks.take(left), self._windows, packer))
        wants = plan.wants[decodes:]
        if self._last is None or not (narrow or few_wanted(chunks.counts, wants)):
            return steps, None
        queries = decodes + np.cumsum(wants) - wants if narrow else first + chunks.counts - wants
        ends = Sequences(chunks.rows, chunks.starts + chunks.counts - wants, wants, queries)
        ends = ends.take(np.flatnonzero(wants))
        place, windows = self._last
        return steps, LastLayers(
            place, lambda p: [self._over_pages(ends, windows, p)] if len(ends) else [], last_packer
        )

    def shared_prefixes(self, work: DecodeWork, plan: Plan, packer: Packer, parity: int) -> SharedKeys | None:
        """The parts of shared prefixes that FlashInfer computes for decodes, which come first in the plan; None if
        there are none."""
        if not len(work.shared_prefixes) or self._flashinfer is None:
            return None
        count = len(work.order)
        decodes = Sequences(plan.rows[:count], plan.starts[:count], plan.counts[:count], np.arange(count))
        return SharedKeys(work.shared_prefixes, work.order, decodes, packer, self._flashinfer, parity, self._shape)

    def _over_pages(self, chunks: Sequences, windows: set[int | None], packer: Packer) -> PagedStep:
        return PagedStep(chunks, windows, packer, self._shape, self._variant, self._cut, self._plain)

    def _with_flashinfer(
        self, plan: Plan, chunks: Sequences, packer: Packer, parity: int
    ) -> tuple[list[ChunkStep], np.ndarray]:
        """Returns (what FlashInfer computes, indices of the other chunks)."""
        flashinfer = self._flashinfer
        assert flashinfer is not None
        steps: list[ChunkStep] = []
        left = np.ones(len(chunks), dtype=bool)
        plain = self._windows == {None}
        if self._shares and plain and plan.paths:
            ends = plan.paths[len(plan.requests) - len(chunks) :]
            paths = [path_before(path, p) for path, p in zip(ends, chunks.starts.tolist(), strict=True)]
            fewest = self._bounds.shared
            if shared := cut_shared(paths, chunks, self._shape, self._itemsize, self._chip, flashinfer.tokens, fewest):
                steps.append(SegmentStep(chunks, shared, packer, flashinfer, parity, self._shape))
                left[shared.chosen] = False
        keys = chunks.starts.astype(np.int64) + chunks.counts
        fits = np.flatnonzero((keys <= flashinfer.tokens) & left)
        long = np.zeros(len(chunks), dtype=bool)
        long[fits] = self._bounds.long(chunks.starts[fits].astype(np.int64), chunks.counts[fits].astype(np.int64))
        if long.any():
            part = chunks.take(np.flatnonzero(long))
            # A second SegmentStep would need wrappers of its own, and what is shared fills the chip already.
            alone = cut_alone(part, self._chip, flashinfer.tokens) if plain and not steps else None
            if alone is not None:
                steps.append(SegmentStep(part, alone, packer, flashinfer, parity, self._shape))
            else:
                steps.append(RaggedStep(part, self._windows, packer, flashinfer, parity, self._shape.page_size))
        return steps, np.flatnonzero(left & ~long)
