"""Kinds of layers: layers whose attention has the same heads. Each kind has its own kernels, and plans its own part of
a step: how work is best divided depends on the heads. Nearly all models have one kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from radixrt.worker.cuda.attention import attend, kernel_checks, variants
from radixrt.worker.cuda.attention.attend import Scratch
from radixrt.worker.cuda.attention.chunk_plan import ChunkPlanner
from radixrt.worker.cuda.attention.decodes import (
    Cuts,
    DecodePlanner,
    DecodeWork,
    Lists,
    Room,
    SharedPrefixes,
    sharing_cost,
)
from radixrt.worker.cuda.attention.kernel_checks import same_bits
from radixrt.worker.cuda.attention.pages import Pages
from radixrt.worker.cuda.attention.ragged import FlashInfer
from radixrt.worker.cuda.attention.segments import Chip
from radixrt.worker.cuda.attention.step import DecodeLists, Kernels, StepAttention
from radixrt.worker.cuda.attention.variants import Shape
from radixrt.worker.cuda.elementwise.staging import Packer
from radixrt.worker.cuda.latent.full_chunks import FullHeads, FullStep
from radixrt.worker.model.layers.latent import UpProjections
from radixrt.worker.model.layers.mixers import Attend, Projected
from radixrt.worker.model.spec.spec import ModelSpec
from radixrt.worker.plan import Plan

EXACT_PART = 1024
"""Keys of a part of a tile (`Tiling.fixed`) where results must not depend on the batch."""

Works = dict[int | None, DecodeWork]
"""The work of decodes in the layers of a kind, by window."""
DTypes = tuple[torch.dtype, torch.dtype, torch.device]
"""The dtypes of pages and of activations, and the device."""


class AttentionGroup:
    """The layers with attention at `places` (see `ModelSpec.attention_layers`), which have heads of one `shape`. For
    the other parameters see `CudaRunner`."""

    def __init__(
        self, spec: ModelSpec, shape: Shape, places: Sequence[int], dtypes: DTypes, num_sms: int,
        flashinfer: FlashInfer | None, full: FullHeads | None, tree_attention: bool, exact: bool,
    ) -> None:  # fmt: skip
        windows = tuple(spec.attention_windows[place] for place in places)
        self.windows = set(windows)
        itemsize = dtypes[0].itemsize
        few, many = variants.decode_variant(shape, itemsize), variants.shared_variant(shape, itemsize)
        chunk = variants.chunk_variant(shape, itemsize)
        special = None if exact else kernel_checks.find_specialised(shape, *dtypes)
        plain = None
        if special is not None:
            many = special
            if self.windows == {None}:
                chunk = special
            elif None in self.windows:  # the special kernel has no windows
                plain = special, attend.best_tiling(special, shape, *dtypes, causal=True)
        chunk_cut = attend.best_tiling(chunk, shape, *dtypes, causal=True)
        if exact:
            few = few if same_bits(few, chunk, shape, *dtypes) else chunk
            chunk_cut = dataclasses.replace(chunk_cut, fixed=EXACT_PART)
            tree_attention, flashinfer, full = False, None, None
        self.compiled = Kernels(shape, few, many, exact)
        chip = Chip(shape.heads, num_sms)
        self.shares = shares = tree_attention and None in self.windows
        """Whether it reads keys that requests share once (`Plan.paths`)."""
        self.cuts = Cuts(
            chunk_cut if exact else attend.best_tiling(few, shape, *dtypes, causal=False),
            attend.best_tiling(many, shape, *dtypes, causal=False),
            sharing_cost(shape, itemsize, many) if shares else None,
            SharedPrefixes(chip, flashinfer.tokens) if shares and flashinfer and special is None else None,
        )
        self.decodes = DecodePlanner(self.windows, self.cuts)
        self.chunks = ChunkPlanner(
            shape, itemsize, windows, chunk, chunk_cut, chip, flashinfer, shares, plain, full,
            _last_layers(spec, places),
        )  # fmt: skip
        self.last_packers = Packer(dtypes[2]), Packer(dtypes[2])
        """Of even and odd steps."""

    @property
    def shape(self) -> Shape:
        return self.compiled.shape

    def plan_decodes(self, plan: Plan, count: int, room: Room | None) -> Works:
        """The work of the first `count` requests. `room`: see `DecodePlanner.plan`."""
        requests, paths = plan.requests[:count], plan.paths[:count]
        return self.decodes.plan(requests, paths, plan.rows[:count], plan.starts[:count], room)


def _last_layers(spec: ModelSpec, places: Sequence[int]) -> tuple[int, set[int | None]] | None:
    """Those of the layers at `places` that may be computed for few tokens (see `ChunkPlanner`): those after
    `ModelSpec.writers`, or the model's last layer; None if there are none, or if a predictor needs the hidden
    states of all tokens."""
    if spec.index or spec.predicts or not spec.ends_with_attention:
        return None
    first = min(spec.writers, spec.num_layers - 1)
    last = [place for place in places if spec.attention_layers[place] >= first]
    return (last[0], {spec.attention_windows[place] for place in last}) if last else None


class PlannedStep:
    """A step's attention in the layers of a kind, planned and packed."""

    def __init__(
        self, kind: AttentionGroup, plan: Plan, decodes: int, works: Works, packer: Packer, parity: int, narrow: bool
    ) -> None:
        """`works` is the work of the first `decodes` requests; chunks follow. For `parity` and `narrow` see
        `ChunkPlanner.plan`."""
        chunks = kind.chunks
        self._kind = kind
        self._partials = max((work.few.partials + work.many.partials for work in works.values()), default=0)
        self._lists = {window: Lists.pack(packer, work) for window, work in works.items()}
        self._shared_prefixes = {
            window: chunks.shared_prefixes(work, plan, packer, parity) for window, work in works.items()
        }
        long = chunks.by_full_heads(plan, decodes)
        self._chunks, self._last = chunks.plan(plan, decodes, packer, kind.last_packers[parity], parity, long, narrow)
        self._full: FullStep | None = None
        self._absorbed = 0
        if long.any():
            self._full, self._absorbed = chunks.plan_full(plan, decodes, long, packer)

    def sent(self, pages: Callable[[int], Pages], slots: torch.Tensor, integers: torch.Tensor) -> StepAttention:
        """The attention, when the packed integers are on the device. `slots` are those of the step's tokens."""
        for chunk in self._chunks:
            chunk.sent(integers)
        if self._full:
            self._full.sent(integers)
        lists = {
            window: DecodeLists.of(work, integers, self._shared_prefixes[window])
            for window, work in self._lists.items()
        }
        scratch = Scratch.make(self._partials, self._kind.shape, integers.device) if lists else None
        return StepAttention(
            pages, slots, self._kind.compiled, lists, scratch, self._chunks, self._last, self._full, self._absorbed
        )


class AttentionGroups:
    """The kinds of a model's layers."""

    def __init__(
        self, spec: ModelSpec, page_size: int, dtypes: DTypes, num_sms: int, flashinfer: FlashInfer | None,
        full: FullHeads | None, tree_attention: bool, exact: bool,
    ) -> None:  # fmt: skip
        """See AttentionGroup."""
        others = dtypes, num_sms, flashinfer, full, tree_attention, exact
        by_shape: dict[Shape, list[int]] = {}
        for place in range(len(spec.attention_layers)):
            by_shape.setdefault(Shape.of(spec, page_size, place), []).append(place)
        self.all = [AttentionGroup(spec, shape, places, *others) for shape, places in by_shape.items()]
        self._of_place = [list(by_shape).index(Shape.of(spec, page_size, n)) for n in range(len(spec.attention_layers))]

    def plan_decodes(self, plan: Plan, count: int, size: int) -> list[Works]:
        """The work of the first `count` requests, by kind of layers, which fits the graph of a `size`, if not 0."""
        return [kind.plan_decodes(plan, count, Room.of(size, kind.cuts) if size else None) for kind in self.all]

    def pack(
        self, plan: Plan, decodes: int, works: list[Works] | None, packer: Packer, parity: int, narrow: bool
    ) -> PackedAttention:
        """A step's attention. `works` is the work of its first `decodes` requests, if that is known. For `parity` and
        `narrow` see `ChunkPlanner.plan`."""
        if works is None:
            works = self.plan_decodes(plan, decodes, 0) if decodes else [{} for _ in self.all]
        steps = [
            PlannedStep(kind, plan, decodes, each, packer, parity, narrow)
            for kind, each in zip(self.all, works, strict=True)
        ]
        return PackedAttention(self, decodes, steps)

    def attention(self, steps: Sequence[StepAttention]) -> StepAttention | MixedAttention:
        """The attention of all layers from that of each kind."""
        return steps[0] if len(steps) == 1 else MixedAttention([steps[kind] for kind in self._of_place])


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """A step's attention in all layers, planned and packed."""

    kinds: AttentionGroups
    decodes: int
    """How many of its requests are decodes."""
    steps: list[PlannedStep]

    def sent(self, pages: Callable[[int], Pages], slots: torch.Tensor, integers: torch.Tensor) -> Attend:
        """See `PlannedStep.sent`."""
        return self.kinds.attention([step.sent(pages, slots, integers) for step in self.steps])


class MixedAttention:
    """The attention of one step in layers of several kinds."""

    def __init__(self, steps: Sequence[StepAttention]) -> None:
        """By place of a layer."""
        self._steps = steps

    def __call__(self, layer: int, heads: Projected) -> torch.Tensor:
        return self._steps[layer](layer, heads)

    def over_pages(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """See `StepAttention.over_pages`."""
        self._steps[layer].over_pages(layer, q, out)

    def over_latents(
        self, layer: int, queries: tuple[torch.Tensor, torch.Tensor | None], ups: UpProjections, out: torch.Tensor,
        values: torch.Tensor,
    ) -> None:  # fmt: skip
        """See `StepAttention.over_latents`."""
        self._steps[layer].over_latents(layer, queries, ups, out, values)
