"""Weights in integers of 4 or 8 bits on a CPU: a step of few tokens takes as long as it takes to read the weights.

A weight is q * scale + min in float32, with a scale and a min for each group of columns, and is multiplied by float32
activations: only the order of sums differs from the product of the dequantized weight. See `cpu_kernels.cpp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from radixrt.worker.model.layers._cpu_kernels import IntMatrix
from radixrt.worker.model.layers.fp8 import Activations, plain
from radixrt.worker.model.parallel.sharding import Part

HALF_GROUP = 16
FEW = 64
"""The most rows that are multiplied by the integers as they are. For more, the weight is dequantized first: torch's
product of large matrices is faster."""
EXPANDED = 1 << 22
"""About how many weights are dequantized at once."""


@dataclass(frozen=True, slots=True)
class IntWeight:
    """A weight [N, K], of groups of 16 (with 8 bits only) or 32 columns."""

    values: torch.Tensor
    """int8[N, K]; with 4 bits uint8[N, K / 2], and byte i of a group has its column i in the low half, column 16 + i in
    the high one."""
    scales: torch.Tensor
    """float32[N, K / group]."""
    mins: torch.Tensor | None
    """As `scales`; None: all are 0."""
    bits: int
    group: int

    @classmethod
    def of(
        cls, values: torch.Tensor, scales: torch.Tensor, mins: torch.Tensor | None, bits: int, group: int
    ) -> IntWeight:
        """From values [N, K] of 0 to 15, or with 8 bits of -128 to 127."""
        if bits == 4:
            low, high = values.to(torch.uint8).unflatten(1, (-1, 2, HALF_GROUP)).unbind(2)
            values = (low | high << 4).flatten(1)
        return cls(values.to(torch.int8 if bits == 8 else torch.uint8), scales, mins, bits, group)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def columns(self) -> int:
        """K."""
        return self.scales.shape[1] * self.group

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + (0 if self.mins is None else self.mins.nbytes)

    def take(self, rows: torch.Tensor) -> IntWeight:
        """The weight with these of its rows, in this order."""
        mins = None if self.mins is None else self.mins[rows]
        return replace(self, values=self.values[rows], scales=self.scales[rows], mins=mins)

    def part(self, part: Part) -> IntWeight | None:
        """A part of it; None if it begins or ends within a group."""
        if part.dim == 0:
            return self.take(torch.arange(part.start, part.stop))
        if part.start % self.group or part.stop % self.group:
            return None
        groups = slice(part.start // self.group, part.stop // self.group)
        each = self.group * self.bits // 8
        return replace(
            self,
            values=self.values[:, groups.start * each : groups.stop * each].contiguous(),
            scales=self.scales[:, groups].contiguous(),
            mins=None if self.mins is None else self.mins[:, groups].contiguous(),
        )

    def widened(self, group: int, has_mins: bool) -> IntWeight:
        """The same weight with 8 bits, in groups of this size, which divides its own."""
        values, times = self.values, self.group // group
        if self.bits == 4:
            halves = values.unflatten(1, (-1, 1, HALF_GROUP))
            values = torch.cat((halves & 15, halves >> 4), 2).flatten(1)
        mins = torch.zeros_like(self.scales) if self.mins is None and has_mins else self.mins
        scales, mins = (None if x is None else x.repeat_interleave(times, 1) for x in (self.scales, mins))
        assert scales is not None
        return IntWeight(values.to(torch.int8), scales, mins, 8, group)

    def dequantized(self) -> torch.Tensor:
        """float32[N, K]."""
        out = torch.empty(len(self), self.columns)
        self.matrix().dequantize(out.data_ptr(), 0, len(self), 1)
        return out

    def matrix(self) -> IntMatrix:
        """For products. It shares the memory."""
        mins = None if self.mins is None else self.mins.numpy().data
        values, scales = self.values.numpy().data, self.scales.numpy().data
        return IntMatrix(values, scales, mins, len(self), self.columns, self.bits, self.group)


def concatenate_ints(parts: Sequence[IntWeight]) -> IntWeight:
    """One weight with the rows of all parts. If they are of different kinds, it is of one that can hold all of them."""
    group, has_mins = min(part.group for part in parts), any(part.mins is not None for part in parts)
    if len({(part.bits, part.group, part.mins is None) for part in parts}) > 1:
        parts = [part.widened(group, has_mins) for part in parts]
    mins = [part.mins for part in parts if part.mins is not None]
    return replace(
        parts[0],
        values=torch.cat([part.values for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        mins=torch.cat(mins) if mins else None,
    )


@dataclass(frozen=True, slots=True)
class IntLinear:
    """A product with a weight in integers. As `linear.Linear`; with `batch_invariant`, or for at most FEW rows, a row's
    result does not depend on the others. It is computed by up to `threads` threads."""

    weight: IntWeight
    matrix: IntMatrix
    """Of `weight`."""
    bias: torch.Tensor | None
    batch_invariant: bool
    threads: int
    rows: int

    fp8_scaling: ClassVar[None] = None
    """The input is not to be quantized."""

    @classmethod
    def of(cls, weight: IntWeight, bias: torch.Tensor | None = None, batch_invariant: bool = False) -> IntLinear:
        """With as many threads as torch has now."""
        return cls(weight, weight.matrix(), bias, batch_invariant, torch.get_num_threads(), len(weight))

    def __call__(self, x: Activations) -> torch.Tensor:
        x = plain(x)
        out = torch.empty((x.shape[0], self.rows))  # len of a tensor takes as long as a small kernel
        self._multiply(x, out, False)
        return out if x.dtype == out.dtype else out.to(x.dtype)

    def put(self, x: Activations, out: torch.Tensor) -> None:
        """Write the result to `out` [T, out]."""
        out.copy_(self(x))

    def add(self, x: Activations, residual: torch.Tensor, factor: float = 1.0) -> None:
        """Add the result times a factor to residual[T, out], in place."""
        if factor == 1 and residual.dtype == torch.float32 and residual.is_contiguous():
            self._multiply(plain(x), residual, True)
        else:
            residual.add_(self(x), alpha=factor)

    def _multiply(self, x: torch.Tensor, out: torch.Tensor, add: bool) -> None:
        x, count = x.float().contiguous(), x.shape[0]
        if count <= FEW or self.batch_invariant:
            self.matrix.multiply(x.data_ptr(), out.data_ptr(), count, self.threads, add)
        else:
            self._multiply_dequantized(x, out, add)
        if self.bias is not None:
            out.add_(self.bias)

    def _multiply_dequantized(self, x: torch.Tensor, out: torch.Tensor, add: bool) -> None:
        rows = max(1, EXPANDED // self.weight.columns)
        for first, part in zip(range(0, len(self.weight), rows), out.split(rows, 1), strict=True):
            expanded = torch.empty(part.shape[1], self.weight.columns)
            self.matrix.dequantize(expanded.data_ptr(), first, len(expanded), self.threads)
            part.addmm_(x, expanded.t(), beta=float(add))


@dataclass(frozen=True, slots=True)
class IntEmbedding:
    """Rows of a weight in integers. As `linear.Embedding`."""

    weight: IntWeight
    matrix: IntMatrix
    """Of `weight`."""
    dtype: torch.dtype
    """Of the result."""

    @property
    def device(self) -> torch.device:
        return self.weight.values.device

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """[T, hidden] of int64 tokens[T]."""
        out = torch.empty((len(tokens), self.weight.columns))
        self.matrix.take(out.data_ptr(), tokens.contiguous().data_ptr(), len(tokens))
        return out.to(self.dtype)
