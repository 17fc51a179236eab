"""The recurrent layers of one step on a GPU, with linear attention, Mamba-2 or short convolutions: decodes token by
token, longer parts of sequences in chunks. And the copies of recurrent states before and after a step (see
`plan.StateWork`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.elementwise.launching import KernelCache
from radixrt.worker.cuda.elementwise.staging import PackedArray, Packer
from radixrt.worker.cuda.recurrent import convolutions, delta, delta_chunks, mamba, mamba_chunks
from radixrt.worker.cuda.recurrent.cutting import TOKENS, Cut, Runs, cut
from radixrt.worker.cuda.recurrent.delta import DeltaInputs, LayerStates
from radixrt.worker.cuda.recurrent.mamba import MambaInputs
from radixrt.worker.execution.kv_pool import StatePool
from radixrt.worker.model.layers.fp8 import Activations
from radixrt.worker.model.layers.linear import Product
from radixrt.worker.model.layers.mixers import RecurrentMixer
from radixrt.worker.model.layers.recurrent.delta_net import DeltaNet
from radixrt.worker.model.layers.recurrent.mamba_mixer import Mamba
from radixrt.worker.model.layers.recurrent.short_conv import ShortConv
from radixrt.worker.model.spec.delta_spec import DeltaSpec, ShortConvSpec
from radixrt.worker.model.spec.mamba_spec import MambaSpec
from radixrt.worker.plan import Plan, StateWork

WIDTHS = 64, 128
"""Widths of heads of q and k in kernels for chunks, rounded up to a power of 2, and what the width of a head of v is a
multiple of. For products with fewer columns, Triton makes programs for Hopper that read beyond shared memory (its issue
11366); with more, tiles would not fit in it."""
STATES = 64, 128, 256
"""Columns of a Mamba-2 head's state for which there are kernels for chunks."""
KERNELS = 2, 3, 4
"""Inputs that the convolution of a token sees."""

Spec = DeltaSpec | ShortConvSpec | MambaSpec


def no_kernels(spec: Spec) -> str:
    """The reason why the kernels cannot compute such layers; "" if they can."""
    if spec.kernel not in KERNELS:
        return f"convolutions of {spec.kernel} inputs have no kernels"
    if isinstance(spec, DeltaSpec) and spec.value_dim % delta.SLIM.columns:
        return f"linear attention has no kernels for heads of width {spec.value_dim}"
    if isinstance(spec, MambaSpec) and not (_is_power(spec.head_dim) and _is_power(spec.state)):
        return f"Mamba-2 has no kernels for heads of {spec.head_dim} elements and {spec.state} in their state"
    return ""


def _is_power(size: int) -> bool:
    return size & (size - 1) == 0


def by_tokens(spec: Spec, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the tokens of a sequence have to be computed one after the other, also where that need not be exact."""
    if isinstance(spec, MambaSpec):
        there = spec.head_dim in WIDTHS and spec.state in STATES and dtype.itemsize == 2
        return device.type == "cuda" and not there
    if isinstance(spec, ShortConvSpec):
        return False
    if spec.rank and not is_whole(spec):
        return True
    if device.type != "cuda":
        return not _is_power(spec.value_dim)
    keys = triton.next_power_of_2(spec.key_dim)
    return keys not in WIDTHS or spec.value_dim % WIDTHS[0] > 0 or dtype.itemsize != 2


def is_whole(spec: DeltaSpec) -> bool:
    """Whether the widths of heads are powers of 2."""
    return _is_power(spec.key_dim) and _is_power(spec.value_dim)


def projected_widths(spec: Spec) -> tuple[int, ...]:
    """Elements of what a layer projects of a token: by each of `products`."""
    if isinstance(spec, ShortConvSpec):
        return (3 * spec.channels,)
    if isinstance(spec, MambaSpec):
        return (spec.values + spec.channels + spec.heads,)
    return spec.channels + (2 * spec.rank or spec.values), (1 if spec.rank else 2) * spec.value_heads


def products(net: RecurrentMixer) -> tuple[Product, ...]:
    """The projections whose results `DeltaStep.put` takes."""
    return (net.qkvz, net.ba) if isinstance(net, DeltaNet) else tuple(net.products)


def _spec_of(net: RecurrentMixer) -> DeltaSpec | MambaSpec:
    assert isinstance(net, DeltaNet | Mamba)
    return net.spec


def result_shape(spec: Spec) -> tuple[int, ...]:
    """Of one token."""
    if isinstance(spec, MambaSpec):
        return (spec.values,)
    return (spec.channels,) if isinstance(spec, ShortConvSpec) else (spec.value_heads, spec.value_dim)


def chunk_bytes(spec: Spec, itemsize: int) -> int:
    """Bytes that kernels for chunks hold of each chunk, for a model's dtype of `itemsize` bytes."""
    if isinstance(spec, ShortConvSpec):
        return 0
    if isinstance(spec, MambaSpec):
        return itemsize * math.prod(spec.rule_shape)
    factors = 3 * spec.key_dim if spec.rank else 0
    return itemsize * TOKENS * (spec.channels + spec.value_heads * (2 * TOKENS + factors))


# ---------------------------------------------------------------- copies


@triton.jit(do_not_specialize=["count"])
def _copy_kernel(copies_ptr, states_ptr, count, size, stride, BLOCK: tl.constexpr):
    source = tl.load(copies_ptr + tl.program_id(1)).to(tl.int64)
    target = tl.load(copies_ptr + count + tl.program_id(1)).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(states_ptr + source * stride + i, mask=i < tl.where(source > 0, size, 0), other=0.0)
    tl.store(states_ptr + target * stride + i, x, mask=i < size)


def copy(pool: StatePool, copies: torch.Tensor) -> None:
    """Copy states, int32[2, N] of (from, to), none of which is both. From slot 0: zeros."""
    count = copies.shape[1]
    for states in (pool.convs, pool.rules):
        size = states[0].numel()
        if not size:  # short convolutions alone
            continue
        grid = triton.cdiv(size, 4096), count
        _copy_kernel[grid](copies, states, count, size, states.stride(0), 4096, num_warps=4)


@dataclass(frozen=True, slots=True)
class PackedCopies:
    """The copies of a step, packed; None where there are none."""

    restores: PackedArray | None
    saves: PackedArray | None

    @classmethod
    def pack(cls, packer: Packer, work: StateWork) -> PackedCopies:
        return cls(*(packer.add(x) if x.shape[1] else None for x in (work.restores, work.saves)))

    def restore(self, pool: StatePool, sent: torch.Tensor) -> None:
        """Before the step."""
        if self.restores is not None:
            copy(pool, self.restores.of(sent))

    def save(self, pool: StatePool, sent: torch.Tensor) -> None:
        """After the step."""
        if self.saves is not None:
            copy(pool, self.saves.of(sent))


# ---------------------------------------------------------------- a step


class DeltaStep:
    """`mixers.Mix` for a step's tokens, decodes first, then parts of sequences. Tokens after them are padding,
    whose results have no meaning.

    decodes    the first tokens: decodes and drafts
    lists      the chunks of the other sequences
    by_tokens  whether all tokens are computed one after the other, by the same kernel
    """

    def __init__(
        self, pool: StatePool, decodes: Runs | None, lists: Cut | None = None, by_tokens: bool = False
    ) -> None:
        self._pool = pool
        self._decodes = decodes
        self._lists = lists
        self._by_tokens = by_tokens
        aligned = pool.convs[0, 0].nbytes % 16 == 0
        self._caches: tuple[KernelCache | None, ...] = ({}, {}) if aligned else (None, None)

    def __call__(self, number: int, net: RecurrentMixer, x: Activations) -> torch.Tensor:
        projected = tuple(product(x) for product in products(net))
        shape = net.conv.shape[:1] if isinstance(net, ShortConv) else result_shape(_spec_of(net))
        out = projected[0].new_empty((len(projected[0]), *shape))
        self.put(number, net, projected, out)
        return out

    def put(self, number: int, net: RecurrentMixer, projected: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        """Write the results for what a layer projects (`products`) to `out`."""
        states = LayerStates(*self._pool.layer(number))
        if isinstance(net, ShortConv):
            before, after, x = projected[0].chunk(3, dim=1)
            torch.mul(after, self._convolved(net, before * x, states), out=out)
            return
        if isinstance(net, Mamba):
            self._put_mamba(net, MambaInputs.of(net, *projected), states, out)
            return
        assert isinstance(net, DeltaNet)
        inputs = DeltaInputs.of(net, *projected)
        _, many = self._caches
        first = 0
        if self._decodes is not None:
            first = len(self._decodes.slots)
            self._decode(net, inputs, states, self._decodes, out[:first])
        if self._lists is not None and self._by_tokens:
            x = torch.empty(inputs.x.shape, dtype=out.dtype, device=out.device)
            convolutions.conv_chunks(inputs.x, net, states.conv, self._lists, x, many)
            delta.by_tokens(x, inputs, net, states, self._lists, out, many, first)
        elif self._lists is not None:
            x = delta_chunks.convolved(net, inputs.x, states, self._lists, many)
            delta_chunks.by_chunks(x, inputs, net, states, self._lists, out, many, first)

    def _decode(self, net: DeltaNet, inputs: DeltaInputs, states: LayerStates, runs: Runs, out: torch.Tensor) -> None:
        few, _ = self._caches
        x = inputs.x.new_empty((len(runs.slots), inputs.x.shape[1]))
        convolutions.conv_step(inputs.x, net, states.conv, runs, x, few)
        tile = delta.SLIM if self._by_tokens else delta.decode_tile(net.spec, len(runs.slots))
        delta.by_tokens(x, inputs, net, states, runs, out, few, tile=tile)

    def _put_mamba(self, net: Mamba, inputs: MambaInputs, states: LayerStates, out: torch.Tensor) -> None:
        x = self._convolved(net, inputs.x, states)
        few, many = self._caches
        if self._decodes is not None:
            decode = mamba.by_tokens if self._by_tokens else mamba.decode
            decode(x, inputs, net, states, self._decodes, out, few)
        if self._lists is not None:
            by_lists = mamba.by_tokens if self._by_tokens else mamba_chunks.by_chunks
            by_lists(x, inputs, net, states, self._lists, out, many)
        mamba.finish(inputs, net, out, few)

    def _convolved(self, net: Mamba | ShortConv, x: torch.Tensor, states: LayerStates) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        few, many = self._caches
        if self._decodes is not None:
            convolutions.conv_step(x, net, states.conv, self._decodes, out, few)
        if self._lists is not None:
            convolutions.conv_chunks(x, net, states.conv, self._lists, out, many)
        return out


@dataclass(frozen=True, slots=True)
class PackedRuns:
    """Packed Runs."""

    slots: PackedArray
    lengths: PackedArray

    @classmethod
    def pack(cls, packer: Packer, work: StateWork, count: int, room: int | None = None) -> PackedRuns:
        """The first `count` entries of a plan; with `room`, padded to so many."""
        lengths = work.runs[:count] if work.runs.size else np.ones(count, dtype=np.int32)
        return cls(packer.add(work.slots[:count], room), packer.add(lengths, room, fill=1))

    def of(self, sent: torch.Tensor) -> Runs:
        return Runs(self.slots.of(sent), self.lengths.of(sent))


@dataclass(frozen=True, slots=True)
class PackedDelta:
    """The packed lists of a DeltaStep."""

    decodes: PackedRuns | None
    lists: tuple[PackedArray, PackedArray] | None
    by_tokens: bool

    @classmethod
    def pack(cls, packer: Packer, plan: Plan, decodes: int, by_tokens: bool) -> PackedDelta:
        """The first `decodes` entries of the plan have one token each. `by_tokens`: see DeltaStep."""
        assert plan.states is not None
        lists = None
        if decodes < len(plan.states.slots):
            chunks, sequences = cut(plan.states.parts(plan.counts).after(decodes))
            lists = packer.add(chunks), packer.add(sequences)
        return cls(PackedRuns.pack(packer, plan.states, decodes) if decodes else None, lists, by_tokens)

    def step(self, pool: StatePool, sent: torch.Tensor) -> DeltaStep:
        decodes = None if self.decodes is None else self.decodes.of(sent)
        lists = None if self.lists is None else Cut(self.lists[0].of(sent), self.lists[1].of(sent))
        return DeltaStep(pool, decodes, lists, self.by_tokens)


class StepStates(Protocol):
    """What a step does with recurrent states."""

    def begin(self, sent: torch.Tensor) -> DeltaStep | None:
        """When the packed integers are on the device: copies to the step's states. Returns what its layers do with
        them; None if there are none, or if a graph has that."""

    def end(self, sent: torch.Tensor) -> None:
        """After the step: copies from its states."""


@dataclass(frozen=True, slots=True)
class PackedStates:
    """That of a model with recurrent layers. `delta` None: a graph has its place."""

    pool: StatePool
    copies: PackedCopies
    delta: PackedDelta | None = None

    def begin(self, sent: torch.Tensor) -> DeltaStep | None:
        self.copies.restore(self.pool, sent)
        return None if self.delta is None else self.delta.step(self.pool, sent)

    def end(self, sent: torch.Tensor) -> None:
        self.copies.save(self.pool, sent)


class NoStates:
    """That of other models."""

    def begin(self, sent: torch.Tensor) -> None:
        return None

    def end(self, sent: torch.Tensor) -> None:
        return None


@dataclass(frozen=True, slots=True)
class RecurrentStates:
    """The states of a runner, None if there are none. `by_tokens`: see DeltaStep."""

    pool: StatePool | None
    by_tokens: bool

    def pack(self, packer: Packer, plan: Plan, decodes: int) -> StepStates:
        """For a step whose first `decodes` entries have one token each."""
        if self.pool is None or plan.states is None:
            return NoStates()
        copies = PackedCopies.pack(packer, plan.states)
        return PackedStates(self.pool, copies, PackedDelta.pack(packer, plan, decodes, self.by_tokens))

    def pack_copies(self, packer: Packer, plan: Plan) -> StepStates:
        """For a step that is a graph."""
        if self.pool is None or plan.states is None:
            return NoStates()
        return PackedStates(self.pool, PackedCopies.pack(packer, plan.states))
