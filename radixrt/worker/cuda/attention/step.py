"""The attention of one step on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from radixrt.worker.cuda.attention import attend, mixed_append
from radixrt.worker.cuda.attention.attend import Scratch
from radixrt.worker.cuda.attention.chunks import ChunkStep, LastLayers
from radixrt.worker.cuda.attention.decodes import Lists
from radixrt.worker.cuda.attention.pages import Pages
from radixrt.worker.cuda.attention.segments import SharedKeys
from radixrt.worker.cuda.attention.variants import Shape, Variant
from radixrt.worker.cuda.elementwise import kernels
from radixrt.worker.cuda.elementwise.staging import of_maybe
from radixrt.worker.cuda.latent import latent
from radixrt.worker.cuda.latent.full_chunks import FullStep
from radixrt.worker.model.layers.latent import LatentHeads, UpProjections
from radixrt.worker.model.layers.layers import Heads
from radixrt.worker.model.layers.mixed_heads import MixedHeads
from radixrt.worker.model.layers.mixers import Projected


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernel variants for tiles of few queries and of many."""

    shape: Shape
    few: Variant
    many: Variant
    exact: bool = False
    """Whether results must not depend on the batch; items may then have keys outside of a layer's window."""


@dataclass(frozen=True, slots=True)
class DecodeLists:
    """The lists of `decodes.Lists` on the device, for the layers of one window."""

    few: attend.Work
    many: attend.Work
    merges: torch.Tensor
    entries: torch.Tensor
    order: torch.Tensor | None
    shared_prefixes: SharedKeys | None = None

    @classmethod
    def of(cls, lists: Lists, sent: torch.Tensor, shared_prefixes: SharedKeys | None = None) -> DecodeLists:
        few, many = ((items.of(sent), of_maybe(starts, sent)) for items, starts in (lists.few, lists.many))
        merges, entries = lists.merges.of(sent), lists.entries.of(sent)
        if shared_prefixes is not None:
            shared_prefixes.sent(sent)
        return cls(few, many, merges, entries, lists.order.of(sent) if lists.shared else None, shared_prefixes)


class StepAttention:
    """The attention of a step's tokens, decodes first, then chunks (see `plan.Plan`). `decodes` is by window, and empty
    without decodes. `last`, if given, has the chunks of the last layers, where only tokens whose logits are wanted are
    needed. `full` has the chunks that full heads compute; the first `absorbed` tokens are computed in the absorbed
    form, and all others by full heads."""

    def __init__(
        self,
        pages: Callable[[int], Pages],
        slots: torch.Tensor,
        compiled: Kernels,
        decodes: dict[int | None, DecodeLists],
        scratch: Scratch | None,
        chunks: list[ChunkStep],
        last: LastLayers | None = None,
        full: FullStep | None = None,
        absorbed: int = 0,
    ) -> None:
        self._pages = pages
        self._slots = slots
        self._compiled = compiled
        self._decodes = decodes
        self._scratch = scratch
        self._chunks = chunks
        self._last = last
        self._full = full
        self._absorbed = absorbed
        self._cache = {key: compiled.shape.kernel_cache() for window in decodes for key in ((window, 0), (window, 1))}

    def __call__(self, layer: int, heads: Projected) -> torch.Tensor:
        if isinstance(heads, LatentHeads):
            return self._of_latents(layer, heads)
        q = append(self._pages(layer), heads, self._slots)
        out = q.new_empty((*q.shape[:2], self._compiled.shape.value_dim))
        self.over_pages(layer, q, out)
        return out

    def _of_latents(self, layer: int, heads: LatentHeads) -> torch.Tensor:
        pages, (tokens, count, _) = self._pages(layer), heads.q.shape
        absorbed, full = tokens, None
        if self._by_full(layer) is not None:
            absorbed, full = self._absorbed, torch.empty_like(heads.q, memory_format=torch.contiguous_format)
        q = heads.q.new_empty((absorbed, count, heads.latent.shape[1]), dtype=latent.multiplied(pages.keys.dtype))
        latent.append(pages, heads, self._slots, q, full)
        out = heads.q.new_empty((absorbed, count, heads.rank))
        values = heads.q.new_empty((tokens, count, heads.ups.v.weight.shape[1]))
        self.over_latents(layer, (q, full), heads.ups, out, values)
        return values

    def over_latents(
        self, layer: int, queries: tuple[torch.Tensor, torch.Tensor | None], ups: UpProjections, out: torch.Tensor,
        values: torch.Tensor,
    ) -> None:  # fmt: skip
        """Write the results of latent attention to values[T, heads, width of a head's value]. `queries` are (the
        absorbed ones, whose sums of latents go to `out`; those of full heads, [T, heads, nope + rope], if the step has
        any)."""
        q, by_full = queries
        step = self._by_full(layer)
        absorbed = len(values) if step is None else self._absorbed
        if absorbed:
            self.over_pages(layer, q, out)
            ups.v.put(out[:absorbed], values[:absorbed])
        if step is not None:
            assert by_full is not None
            step.run(by_full, ups, self._pages(layer), values)

    def _by_full(self, layer: int) -> FullStep | None:
        return None if self._is_last(layer) else self._full

    def _is_last(self, layer: int) -> bool:
        return self._last is not None and layer >= self._last.first

    def over_pages(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """Write the attention of rotated q[T, heads, D] to `out`, when K and V of the step are written to their
        pages."""
        pages = self._pages(layer)
        if self._decodes:
            self._decode(pages, self._decodes[pages.window], q, out)
        chunks = self._last.steps() if self._last and self._is_last(layer) else self._chunks
        for chunk in chunks:
            chunk.run(q, pages, out)

    def _decode(self, pages: Pages, lists: DecodeLists, q: torch.Tensor, out: torch.Tensor) -> None:
        assert self._scratch is not None
        compiled, scratch = self._compiled, self._scratch
        window = pages.window if compiled.exact else None
        for number, (items, variant) in enumerate(((lists.many, compiled.many), (lists.few, compiled.few))):
            # All queries of an item see all its keys, also in layers with a window, so nothing is masked. If exact, the
            # compiled kernel of chunks is used, which masks.
            attend.attend(
                q, pages.keys, pages.values, pages.table, items, out, scratch, compiled.shape, variant,
                order=lists.order, window=window, causal=compiled.exact, scales=pages.scales, sinks=pages.sinks,
                cache=self._cache[pages.window, number],
            )  # fmt: skip
        more = lists.shared_prefixes.run(q, pages) if lists.shared_prefixes else None
        cache = self._cache[pages.window, 0]
        attend.merge(
            scratch.partials, lists.merges, lists.entries, out, compiled.shape, more=more, sinks=pages.sinks,
            cache=cache,
        )  # fmt: skip


def append(
    pages: Pages, heads: Projected, slots: torch.Tensor, out: torch.Tensor | None = None,
    full: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Write a layer's K and V to their pages, if it has any of its own. Returns its rotated queries, in `out` if given.
    For `full` see `latent.append`."""
    if isinstance(heads, LatentHeads):
        return latent.append(pages, heads, slots, out, full)
    if isinstance(heads, MixedHeads):
        return mixed_append.append(heads, slots, pages.keys, pages.values, pages.scales, out)
    assert isinstance(heads, Heads)
    return kernels.append(
        heads.qkv, heads.cos, heads.sin, slots, pages.keys, pages.values, heads.num_heads, heads.norms, heads.eps,
        pages.scales, out, heads.mean_squares,
    )  # fmt: skip
