"""Weights in integers of 4 bits, kept so for kernels that expand them in registers: a quarter of the bytes to read.

A weight is (q - zero) * scale, rounded to the dtype of the model, as if it had been dequantized at load. The scale is
rounded to that dtype first; if it is stored in another one, this makes a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch.nn import functional as F

from radixrt.worker.model.layers.fp8 import Activations, plain
from radixrt.worker.model.parallel.sharding import Part

WIDTH = 256
"""Columns of a block of an Int4."""
WORDS = WIDTH // 8
"""int32 words of a row of such a block."""
GROUP_SIZES = 32, 64, 128
"""Numbers of columns that may share a scale; multiples of the last one, too."""
MIDDLE = 8
"""The zero, if none is stored."""
DTYPES = (torch.bfloat16, torch.float16)
ALIKE = 2**-8
"""The largest relative error of a scale in 16 bits."""


@dataclass(frozen=True, slots=True)
class Int4:
    """A weight [N, K], or those of E experts [E, N, K], in the layout of the kernels: blocks of WIDTH columns of all
    rows.

    word i of a row    columns i, 32 + i, 64 + i, ... 224 + i of the block, 4 bits each, the first in the lowest bits
    facts of a row     the scales of the block's groups, 16 bits each, the first in the lowest bits, then, if they are
                       stored, their zeros, 8 bits each

    Columns past the last one are 0.
    """

    values: torch.Tensor
    """int32[..., ceil(K / WIDTH), N, WORDS]."""
    facts: torch.Tensor
    """int32[..., ceil(K / WIDTH), words, N]."""
    columns: int
    """K."""
    groups: int
    """Groups in a block: 2, 4 or 8."""
    has_zeros: bool
    """Whether zeros are stored; otherwise each is MIDDLE."""
    dtype: torch.dtype
    """Of the scales, and of the weight that is meant."""

    @classmethod
    def of(
        cls, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, dtype: torch.dtype,
        part: Part | None = None,
    ) -> Int4 | None:  # fmt: skip
        """From values [N, K], scales [N, G] and zeros [N, G], integers below 16 and 128, or a part of it. None if the
        groups, or the scales in `dtype`, are not such as kernels can have, or if the part begins within a group.
        ValueError for shapes that do not fit together."""
        if len(values) != len(scales) or (zeros is not None and zeros.shape != scales.shape):
            raise ValueError(f"scales {list(scales.shape)} and zeros do not fit together, or to {list(values.shape)}")
        cut = _cut(values, scales, zeros, part)
        known = scales.to(dtype)
        alike = scales.is_meta or torch.allclose(known.float(), scales.float(), ALIKE, 0.0)  # meta: only sizes matter
        if cut is None or dtype not in DTYPES or not alike:
            return None
        values, scales, zeros, size = cut
        (rows, columns), groups = values.shape, WIDTH // size
        blocks = -(-columns // WIDTH)
        scales = _by_block(scales.to(dtype), blocks, groups)
        zeros = None if zeros is None else _by_block(zeros, blocks, groups)
        padded = F.pad(values.to(torch.int32), (0, blocks * WIDTH - columns)).view(rows, blocks, WIDTH // WORDS, WORDS)
        words = _joined(padded.transpose(2, 3), 4).transpose(0, 1)
        facts = _facts(scales, zeros).permute(1, 2, 0)
        return cls(words.contiguous(), facts.contiguous(), columns, groups, zeros is not None, dtype)

    @property
    def rows(self) -> int:
        """N."""
        return self.values.shape[-2]

    @property
    def shape(self) -> tuple[int, ...]:
        """([E,] N, K)."""
        return *self.values.shape[:-3], self.rows, self.columns

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.facts.nbytes

    def numel(self) -> int:
        """Number of weights."""
        return torch.Size(self.shape).numel()

    def __len__(self) -> int:
        return self.shape[0]

    def is_like(self, other: Int4) -> bool:
        """Whether both have the same columns, groups and dtype."""
        return all(getattr(self, name) == getattr(other, name) for name in ("columns", "groups", "has_zeros", "dtype"))

    def take(self, rows: torch.Tensor) -> Int4:
        """The weight with these of its rows, in this order."""
        return replace(self, values=self.values[:, rows], facts=self.facts[..., rows])

    def stack(self, count: int) -> Int4:
        """Uninitialized weights of `count` experts such as this one."""
        values, facts = (part.new_empty((count, *part.shape)) for part in (self.values, self.facts))
        return replace(self, values=values, facts=facts)

    def put(self, number: int, weight: Int4) -> bool:
        """Store the weight of an expert. Returns False, and does nothing, if it is of another kind."""
        if not self.is_like(weight) or self.rows != weight.rows:
            return False
        self.values[number], self.facts[number] = weight.values, weight.facts
        return True

    def dequantized(self, number: int | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight [N, K], or that of an expert, in its own dtype or another; the reference of the kernels."""
        if number is not None:
            return replace(self, values=self.values[number], facts=self.facts[number]).dequantized(dtype=dtype)
        q = split(self.values, 4).transpose(-1, -2).flatten(-2).transpose(0, 1).flatten(1)
        scales, zeros = (x.repeat_interleave(WIDTH // self.groups, 1) for x in self._scales_and_zeros())
        return ((q - zeros) * scales)[:, : self.columns].to(self.dtype).to(dtype or self.dtype)

    def _scales_and_zeros(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float32[N, groups], int32[N, groups], of all blocks."""
        facts, words = self.facts.permute(2, 0, 1), self.groups // 2
        bits = split(facts[..., :words], 16).to(torch.int16)
        scales = bits.view(self.dtype).float().flatten(1)
        if self.has_zeros:
            return scales, split(facts[..., words:], 8).flatten(2)[..., : self.groups].flatten(1)
        return scales, torch.full_like(scales, MIDDLE, dtype=torch.int32)


def concatenate_int4(parts: Sequence[Int4]) -> Int4 | None:
    """One weight with the rows of all parts; None if they are of different kinds."""
    first, *others = parts
    if not all(first.is_like(part) for part in others):
        return None
    if not others:
        return first
    values = torch.cat([part.values for part in parts], dim=1)
    return replace(first, values=values, facts=torch.cat([part.facts for part in parts], dim=2))


def _cut(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, part: Part | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int] | None:
    """Values, scales and zeros of a part, and the number of columns that share a scale, of GROUP_SIZES; None as
    `Int4.of`."""
    columns, groups = values.shape[1], scales.shape[1]
    size, rest = divmod(columns, groups)
    largest = GROUP_SIZES[-1]
    if groups > 1 and (rest or (size not in GROUP_SIZES and size % largest)):
        return None
    if groups == 1:
        size = -(-columns // largest) * largest
    of_part = slice(None), slice(None)
    if part is not None and part.dim == 0:
        of_part = slice(part.start, part.stop), slice(None)
        values = values[of_part]
    if size > largest:
        scales = scales.repeat_interleave(size // largest, 1)
        zeros = None if zeros is None else zeros.repeat_interleave(size // largest, 1)
        size = largest
    if part is not None and part.dim == 1:
        if part.start % size and groups > 1:
            return None
        of_part = slice(None), slice(part.start // size, -(-part.stop // size))
        values = values[:, part.start : part.stop]
    return values, scales[of_part], None if zeros is None else zeros[of_part], size


def _by_block(x: torch.Tensor, blocks: int, groups: int) -> torch.Tensor:
    """[N, blocks, groups] of [N, G]; groups that are missing are 0."""
    return F.pad(x, (0, blocks * groups - x.shape[1])).view(len(x), blocks, groups)


def _facts(scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
    """int32[N, blocks, words] of scales and zeros [N, blocks, groups]."""
    words = _joined((scales.contiguous().view(torch.int16).int() & 0xFFFF).unflatten(2, (-1, 2)), 16)
    if zeros is None:
        return words
    groups = zeros.shape[2]
    padded = F.pad(zeros.int(), (0, -groups % 4)).unflatten(2, (-1, 4))
    return torch.cat((words, _joined(padded, 8)), 2)


def _joined(parts: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `split`."""
    word = parts[..., 0].clone()
    for number in range(1, parts.shape[-1]):
        word |= parts[..., number] << bits * number
    return word


def split(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32[...] -> int32[..., 32 / bits]: the values that a word is packed of, the first in its lowest bits."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    return words[..., None] >> shifts & (1 << bits) - 1


class Int4Ops(Protocol):
    """The part of `ops.Ops` that products in INT4 need."""

    def int4_linear(
        self,
        x: torch.Tensor,
        weight: Int4,
        bias: torch.Tensor | None,
        batch_invariant: bool,
        out: torch.Tensor | None = None,
        add: bool = False,
    ) -> torch.Tensor:
        """The product of x[T, K] and a weight [N, K] in INT4 transposed, plus bias[N]: a new tensor, or written to
        out[T, N], or added to it with `add`. `batch_invariant`: see `linear.Linear`."""


@dataclass(frozen=True, slots=True)
class Int4Linear:
    """A product with a weight in INT4. As `linear.Linear`."""

    weight: Int4
    bias: torch.Tensor | None
    batch_invariant: bool
    ops: Int4Ops

    fp8_scaling: ClassVar[None] = None
    """The input is not to be quantized."""

    def __call__(self, x: Activations) -> torch.Tensor:
        return self.ops.int4_linear(plain(x), self.weight, self.bias, self.batch_invariant)

    def put(self, x: Activations, out: torch.Tensor) -> None:
        """Write the result to `out` [T, out]."""
        self.ops.int4_linear(plain(x), self.weight, self.bias, self.batch_invariant, out)

    def add(self, x: Activations, residual: torch.Tensor, factor: float = 1.0) -> None:
        """Add the result times a factor to residual[T, out], in place."""
        if factor == 1:
            self.ops.int4_linear(plain(x), self.weight, self.bias, self.batch_invariant, residual, add=True)
        else:
            residual.add_(self(x), alpha=factor)
