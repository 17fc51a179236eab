"""Long chunks of latent attention by full heads (`full_heads`): the workspace, and the chunks of a step.

The workspace holds the latents of a group of sequences, and K and V of some heads. If not all heads fit, they are
computed in turns, each head with all of its keys, so that this needs no merging.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from radixrt.worker.cuda.attention import attend, variants
from radixrt.worker.cuda.attention.attend import Scratch
from radixrt.worker.cuda.attention.chunks import Sequences
from radixrt.worker.cuda.attention.pages import Pages
from radixrt.worker.cuda.attention.variants import Shape, Variant
from radixrt.worker.cuda.attention.work import MERGE_FIELDS, Items, Tiling, make_items, make_merges, sequence_tiles
from radixrt.worker.cuda.elementwise.launching import KernelCache
from radixrt.worker.cuda.elementwise.staging import PackedArray, Packer, of_maybe
from radixrt.worker.cuda.latent import full_heads
from radixrt.worker.cuda.latent.full_heads import ALIGN, Keys
from radixrt.worker.model.layers.latent import UpProjections
from radixrt.worker.model.layers.linear import HeadLinear
from radixrt.worker.model.spec.spec import ModelSpec

WORKSPACE = 1 << 29
"""The most bytes of K and V of the heads of a turn, unless a single head of the longest group needs more."""


class FullHeads:
    """The workspace, and the `variant` of the kernel that reads it, of which the chip runs `programs` programs at
    once."""

    def __init__(
        self, spec: ModelSpec, page_size: int, dtype: torch.dtype, device: torch.device, tokens: int, variant: Variant,
        programs: int, room: int = WORKSPACE,
    ) -> None:  # fmt: skip
        """For groups of sequences with up to `tokens` tokens together; `room` is in bytes."""
        assert spec.latent is not None
        self.latent = spec.latent
        self.heads = spec.num_heads
        self.scale = spec.scale
        self.page_size = page_size
        self.variant = variant
        self.programs = programs
        self.tokens = -(-tokens // ALIGN) * ALIGN
        self._latents = torch.empty((self.tokens, spec.head_dim), dtype=dtype, device=device)
        each = spec.latent.nope_dim + spec.latent.value_dim
        size = min(max(room // dtype.itemsize, self.tokens * each), self.tokens * self.heads * each)
        self._keys_values = torch.empty(size, dtype=dtype, device=device)
        self.out_shape = Shape(self.heads, self.heads, spec.latent.value_dim, 1)
        """The shape of the results that are merged."""

    def heads_at_once(self, tokens: int) -> int:
        """Heads per turn for a group of `tokens` tokens: with as few turns as possible, of about equal size."""
        most = len(self._keys_values) // (tokens * (self.latent.nope_dim + self.latent.value_dim))
        times = -(-self.heads // min(most, self.heads))
        return -(-self.heads // times)

    def tiling(self, heads: int) -> Tiling:
        """The tiling of a turn of `heads` heads."""
        variant, programs = self.variant, max(1, self.programs // heads)
        return Tiling(variant.rows, variant.keys, 2 * variant.keys, programs, single=not variant.specialised)

    def latents(self, tokens: int) -> torch.Tensor:
        """The part of the workspace for latents, [tokens, rank + rope]."""
        return self._latents[:tokens]

    def keys(self, tokens: int, count: int) -> Keys:
        """The parts of the workspace for K and V of `count` heads, and for the latents."""
        found, begin = [], 0
        for width in (self.latent.nope_dim, self.latent.value_dim):
            end = begin + tokens * count * width
            found.append(self._keys_values[begin:end].view(tokens, count, width))
            begin = end
        return Keys.of(found[0], found[1], self.latents(tokens), self.variant)

    def multiply_out(self, ups: UpProjections, keys: Keys, first: int) -> None:
        """Compute `keys` of the heads from `first` on, from the latents in the workspace."""
        latents = keys.latents[:, : self.latent.rank]
        for columns, out in zip(ups.columns, (keys.k, keys.v), strict=True):
            count, width = out.shape[1:]
            torch.mm(latents, columns[:, first * width : (first + count) * width], out=out.flatten(1))

    def try_out(self, pages: torch.dtype) -> None:
        """Compile the kernels and run them once. Any exception means that they cannot be used."""
        latent, like = self.latent, self._latents
        tokens, none = np.array([3], dtype=np.int32), np.zeros(1, dtype=np.int32)
        packer = Packer(self._latents.device)
        step = FullStep(Sequences(none, none, tokens, none), packer, self)
        step.sent(packer.send())
        keys = like.new_zeros((self.page_size, 1, like.shape[1])).to(pages)
        table = torch.zeros((1, 3), dtype=torch.int32, device=keys.device)
        up = like.new_zeros((self.heads, latent.nope_dim, latent.rank)).transpose(1, 2)
        down = like.new_zeros((self.heads, latent.value_dim, latent.rank))
        q = like.new_zeros((3, self.heads, latent.nope_dim + latent.rope_dim))
        out = q.new_empty((3, self.heads, latent.value_dim))
        step.run(q, UpProjections(HeadLinear(up), HeadLinear(down)), Pages(keys, keys, table, (1.0, 1.0), None), out)
        scratch, nothing = Scratch.make(1, self.out_shape, q.device), table.new_zeros((1, MERGE_FIELDS))
        attend.merge(scratch.partials, nothing, nothing[0], out, self.out_shape)
        if q.is_cuda:
            torch.cuda.synchronize(q.device)

    def kernel_cache(self) -> KernelCache | None:
        """As `Shape.kernel_cache`; None also if the parts of the workspace may be aligned differently."""
        widths = self.latent.nope_dim, self.latent.rope_dim, self.latent.value_dim, self.latent.rank
        return {} if all(width % 16 == 0 for width in widths) else None


def find(
    spec: ModelSpec, page_size: int, pages: torch.dtype, dtype: torch.dtype, device: torch.device, tokens: int
) -> FullHeads | None:
    """FullHeads with its kernels compiled. None if it does not apply: it needs latent attention, a 16-bit dtype, a CUDA
    device, and pages in that dtype or in FP8."""
    if spec.latent is None or dtype.itemsize != 2 or device.type != "cuda":
        return None
    if pages != dtype and pages.itemsize > 1:
        return None
    variant = full_heads.chunk_variant(variants.room())
    variant = full_heads.find_specialised(spec.latent, spec.num_heads, dtype, device, variant) or variant
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    heads = FullHeads(spec, page_size, dtype, device, tokens, variant, num_sms)
    heads.try_out(pages)
    return heads


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences that fit the workspace together: their places (see `full_heads.gather`), and their work items."""

    where: PackedArray
    longest: int
    keys: list[Keys]
    """K and V of each turn's heads."""
    items: PackedArray
    starts: PackedArray | None


class FullStep:
    """The chunks of one step that full heads compute."""

    def __init__(self, sequences: Sequences, packer: Packer, full: FullHeads) -> None:
        self._full = full
        self.chunks = len(sequences)
        keys = sequences.starts.astype(np.int64) + sequences.counts
        room = -(-keys // ALIGN) * ALIGN
        planned: list[tuple[np.ndarray, int, list[Keys], Items]] = []
        partials = 0
        for chosen in _groups(room, full.tokens):
            part, ends = sequences.take(chosen), room[chosen]
            begin = np.cumsum(ends) - ends
            where = np.stack([part.rows, keys[chosen], begin], axis=1).astype(np.int32)
            tokens = int(ends.sum())
            heads = full.heads_at_once(tokens)
            cut = full.tiling(heads)
            tiles = sequence_tiles(begin, part.starts, part.counts, part.queries, None, cut.queries)
            items, _ = make_items(tiles, cut, partials)
            partials += items.partials
            sizes = (min(heads, full.heads - first) for first in range(0, full.heads, heads))
            places = [full.keys(tokens, count) for count in sizes]
            planned.append((where, int(keys[chosen].max()), places, items))
        lists = [items.items for *_, items in planned]
        merges = make_merges(lists)
        entries, self._partials = _without_direct(lists, merges.entries)
        self._groups = [
            _Group(
                packer.add(where), longest, places, packer.add(items.items),
                None if items.starts is None else packer.add(items.starts),
            )
            for where, longest, places, items in planned
        ]  # fmt: skip
        self._merges, self._entries = packer.add(merges.queries), packer.add(entries)

    def sent(self, integers: torch.Tensor) -> None:
        """Called with the packed integers on the device, before `run`."""
        self._lists = [
            (group.where.of(integers), (group.items.of(integers), of_maybe(group.starts, integers)))
            for group in self._groups
        ]
        self._merging = self._merges.of(integers), self._entries.of(integers)
        self._scratch = Scratch.make(self._partials, self._full.out_shape, integers.device)
        self._cache = self._full.kernel_cache()

    def run(self, q: torch.Tensor, ups: UpProjections, pages: Pages, out: torch.Tensor) -> None:
        """Write the results of the chunks' tokens among rotated q[T, heads, nope + rope] to out[T, heads, width of a
        head's value], when latents are written to their pages. Does little on the host, since it runs for every
        layer."""
        full, cache = self._full, self._cache
        for group, (where, work) in zip(self._groups, self._lists, strict=True):
            full_heads.gather(pages, full.page_size, where, group.longest, group.keys[0].latents, cache)
            first = 0
            for keys in group.keys:
                full.multiply_out(ups, keys, first)
                full_heads.attend_full(
                    q, keys, work, out, self._scratch, full.variant, first, full.scale, pages.scales, cache
                )
                first += keys.k.shape[1]
        attend.merge(self._scratch.partials, *self._merging, out, full.out_shape, cache=cache)


def _without_direct(lists: list[np.ndarray], entries: np.ndarray) -> tuple[np.ndarray, int]:
    """Renumber partial results so that only those that are merged have places: most queries have one result, which is
    written directly. Returns (entries, number of partial results); the items of `lists` are changed in place."""
    before = np.concatenate([items[:, 6] for items in lists])
    size = np.concatenate([np.where(items[:, 7] != 0, 0, items[:, 1]) for items in lists]).astype(np.int64)
    after = np.cumsum(size) - size
    of = np.searchsorted(before, entries, side="right") - 1
    first = 0
    for items in lists:
        items[:, 6] = after[first : first + len(items)]
        first += len(items)
    return (entries - before[of] + after[of]).astype(np.int32), max(1, int(size.sum()))


def _groups(keys: np.ndarray, room: int) -> Iterator[np.ndarray]:
    """Runs of sequences whose keys together fit `room`. Those of each single sequence must."""
    begin, total = 0, 0
    for i, count in enumerate(keys.tolist()):
        if total + count > room and i > begin:
            yield np.arange(begin, i)
            begin, total = i, 0
        total += count
    yield np.arange(begin, len(keys))
