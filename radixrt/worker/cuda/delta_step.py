"""The linear attention of one step on a GPU: decodes token by token, longer parts of sequences in chunks. And the
copies of recurrent states before and after a step (see `plan.StateWork`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from radixrt.worker.cuda import delta, delta_chunks
from radixrt.worker.cuda.delta import DeltaInputs, LayerStates
from radixrt.worker.cuda.delta_chunks import Cut
from radixrt.worker.cuda.launching import KernelCache
from radixrt.worker.cuda.staging import PackedArray, Packer
from radixrt.worker.kv import StatePool
from radixrt.worker.model.delta_net import DeltaNet
from radixrt.worker.model.delta_spec import DeltaSpec, ShortConvSpec
from radixrt.worker.model.scaled import Rounded
from radixrt.worker.model.short_conv import ShortConv
from radixrt.worker.plan import Plan, StateWork

WIDTHS = 64, 128
"""Widths of heads. For products with fewer columns, Triton makes programs for Hopper that read beyond shared memory
(its issue 11366); with more, tiles would not fit in it."""
KERNELS = 2, 3, 4
"""Inputs that the convolution of a token sees."""


def no_kernels(spec: DeltaSpec | ShortConvSpec) -> str:
    """The reason why the kernels cannot compute such layers; "" if they can."""
    if isinstance(spec, ShortConvSpec):
        return "layers of short convolutions alone have no kernels"
    if spec.rank:
        return "linear attention with a decay for each element of a key has no kernels"
    if spec.key_dim not in WIDTHS or spec.value_dim not in WIDTHS:
        return f"linear attention has no kernels for heads of width {spec.key_dim} and {spec.value_dim}"
    return "" if spec.kernel in KERNELS else f"linear attention has no kernels for convolutions of {spec.kernel} inputs"


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
    """`model.delta_net.Mix` for a step's tokens, decodes first, then parts of sequences. Tokens after them are padding,
    whose results have no meaning.

    decodes    integer [D]: slots of the states of the first D tokens
    lists      the parts of the other sequences
    sequences  if given, all tokens are computed one after the other: int32[B, 3] of (slot, first token, end). `lists`
               are then of all of them
    """

    def __init__(
        self, pool: StatePool, decodes: torch.Tensor | None, lists: Cut | None = None,
        sequences: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self._pool = pool
        self._decodes = decodes
        self._lists = lists
        self._sequences = sequences
        aligned = pool.convs[0, 0].nbytes % 16 == 0
        self._caches: tuple[KernelCache | None, ...] = ({}, {}) if aligned else (None, None)

    def __call__(self, number: int, net: DeltaNet | ShortConv, x: torch.Tensor | Rounded) -> torch.Tensor:
        assert isinstance(net, DeltaNet)
        inputs = DeltaInputs.of(net.spec, net.qkvz(x), net.ba(x))
        out = inputs.x.new_empty((len(inputs.x), net.spec.value_heads, net.spec.value_dim))
        self.put(number, net, inputs, out)
        return out

    def put(self, number: int, net: DeltaNet, inputs: DeltaInputs, out: torch.Tensor) -> None:
        """Write the results for what a layer projects to out[T, value_heads, value_dim]."""
        states = LayerStates(*self._pool.layer(number))
        few, many = self._caches
        x = torch.empty(inputs.x.shape, dtype=inputs.x.dtype, device=inputs.x.device)
        if self._decodes is not None:
            delta.conv_step(inputs.x, net, states.conv, self._decodes, x, few)
            delta.decode(x, inputs, net, states, self._decodes, out, few)
        if self._lists is None:
            return
        delta_chunks.conv_chunks(inputs.x, net, states.conv, self._lists.chunks, x, many)
        if self._sequences is None:
            delta_chunks.by_chunks(x, inputs, net, states, self._lists, out, many)
        else:
            delta.by_tokens(x, inputs, net, states, self._sequences, out, many)


@dataclass(frozen=True, slots=True)
class PackedDelta:
    """The packed lists of a DeltaStep."""

    decodes: PackedArray | None
    lists: tuple[PackedArray, PackedArray] | None
    sequences: PackedArray | None

    @classmethod
    def pack(cls, packer: Packer, plan: Plan, decodes: int, exact: bool) -> PackedDelta:
        """The first `decodes` requests of the plan have one token each. `exact`: results must not depend on how
        sequences are cut into steps."""
        assert plan.states is not None
        slots, bounds = plan.states.slots, np.concatenate([[0], np.cumsum(plan.counts, dtype=np.int64)])
        first = 0 if exact else decodes
        lists = sequences = None
        if first < len(slots):
            chunks, over = delta_chunks.cut(slots[first:], bounds[first:])
            lists = packer.add(chunks), packer.add(over)
        if exact:
            sequences = packer.add(np.stack((slots, bounds[:-1], bounds[1:]), axis=1).astype(np.int32))
        return cls(packer.add(slots[:first]) if first else None, lists, sequences)

    def step(self, pool: StatePool, sent: torch.Tensor) -> DeltaStep:
        decodes, sequences = (None if x is None else x.of(sent) for x in (self.decodes, self.sequences))
        lists = None if self.lists is None else Cut(*(x.of(sent) for x in self.lists))
        return DeltaStep(pool, decodes, lists, sequences)
