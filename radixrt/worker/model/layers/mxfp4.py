"""Weights in MXFP4 (OCP Microscaling Formats 1.0, section 5.3): 32 values in E2M1 share one scale in E8M0."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 32
"""Values that share a scale. Two values are a byte, the first one its low half."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes by the lower three bits; the fourth bit is the sign."""
WIDTH = 128
"""Columns of a block of a PackedStack."""
WORDS = WIDTH // 8
"""int32 words of a row of such a block."""
LARGEST = 128
"""The largest scale byte of a PackedStack, 2**1: kernels multiply by 2**126 times the scale, which must be a finite
bfloat16 (`cuda.moe.packed_experts`)."""


def dequantize(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A matrix [R, C] in `dtype`, of blocks uint8[R, C / 32, 16] and scales uint8[R, C / 32]."""
    values = torch.tensor([*E2M1, *(-x for x in E2M1)], device=blocks.device)
    nibbles = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    powers = scales.contiguous().view(torch.float8_e8m0fnu).float()
    return (values[nibbles.int()] * powers[..., None]).flatten(1).to(dtype)


@dataclass(frozen=True, slots=True)
class PackedStack:
    """Weights [N, K] of E experts in MXFP4, in the layout of the kernels: blocks of WIDTH columns of all rows.

    word i of a row    columns i, 16 + i, 32 + i, ... 112 + i of the block, 4 bits each, the first in the lowest bits
    scale of a row     of columns 0-31, 32-63, 64-95 and 96-127, 8 bits each, the first in the lowest bits

    Columns past the last one are 0.
    """

    values: torch.Tensor
    """int32[E, ceil((before + K) / WIDTH), N, WORDS]."""
    scales: torch.Tensor
    """int32[E, ceil((before + K) / WIDTH), N]."""
    columns: int
    """K."""
    before: int
    """Columns stored before the first one, below BLOCK: the columns of a rank may begin within a group that shares a
    scale."""

    @classmethod
    def empty(
        cls, count: int, rows: int, columns: int, before: int = 0, device: torch.device | None = None
    ) -> PackedStack:
        """Uninitialized, for `put`."""
        shape = count, -(-(before + columns) // WIDTH), rows
        values, scales = (torch.empty(s, dtype=torch.int32, device=device) for s in ((*shape, WORDS), shape))
        return cls(values, scales, columns, before)

    def put(self, number: int, blocks: torch.Tensor, scales: torch.Tensor) -> None:
        """Store an expert's blocks uint8[N, B, 16] and scales uint8[N, B], B = ceil((before + K) / 32). The scales must
        be such that `fits`."""
        rows, count = scales.shape
        wanted = self.values.shape[1] * WIDTH // BLOCK
        blocks = torch.nn.functional.pad(blocks, (0, 0, 0, wanted - count))
        scales = torch.nn.functional.pad(scales, (0, wanted - count), value=LARGEST - 1)
        nibbles = torch.stack((blocks & 15, blocks >> 4), -1).view(rows, -1, WIDTH // WORDS, WORDS)
        self.values[number] = _joined(nibbles.transpose(2, 3), 4).transpose(0, 1)
        self.scales[number] = _joined(scales.view(rows, -1, WIDTH // BLOCK), 8).transpose(0, 1)

    def dequantized(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        """The weight [N, K] of an expert, in `dtype`."""
        shifts = torch.arange(0, 32, 4, device=self.values.device)
        nibbles = (self.values[number][..., None] >> shifts & 15).transpose(-1, -2).flatten(-2)
        scales = self.scales[number][..., None] >> shifts[::2] & 255
        values = torch.tensor([*E2M1, *(-x for x in E2M1)], device=nibbles.device)[nibbles]
        powers = torch.exp2(scales.float() - 127).repeat_interleave(BLOCK, -1)
        whole = (values * powers).transpose(0, 1).flatten(1)
        return whole[:, self.before : self.before + self.columns].to(dtype)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def numel(self) -> int:
        """Number of weights."""
        return self.values.shape[0] * self.values.shape[2] * self.columns


def fits(scales: torch.Tensor) -> bool:
    """Whether a PackedStack can hold these scales. Those on the meta device, where only sizes matter, fit."""
    return scales.is_meta or int(scales.max()) <= LARGEST


def _joined(parts: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack the last dimension into one int32: values of `bits` bits each, the first in the lowest bits."""
    shifts = torch.arange(0, 32, bits, device=parts.device)
    return (parts.long() << shifts).sum(-1).to(torch.int32)
