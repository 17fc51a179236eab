"""Weights in MXFP4 (OCP Microscaling Formats 1.0, section 5.3): 32 numbers, E2M1, share a power of two, E8M0."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 32
"""Values that share a scale; two of them are a byte, the first one its low half."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""By the lower three bits; the fourth is the sign."""
WIDTH = 128
"""Columns of a PackedStack that lie together."""
WORDS = WIDTH // 8
LARGEST = 128
"""The largest scale that a PackedStack can have, 2**(128 - 127): kernels multiply with 2**126 times the scale, which
bfloat16 must hold (`cuda.packed_experts`). Larger ones make weights of 8 and more."""


def multiplied_out(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[R, C] of uint8 blocks [R, C / 32, 16] of MXFP4 and their scales, uint8[R, C / 32] of E8M0."""
    values = torch.tensor([*E2M1, *(-x for x in E2M1)], device=blocks.device)
    halves = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    powers = scales.contiguous().view(torch.float8_e8m0fnu).float()
    return (values[halves.int()] * powers[..., None]).flatten(1).to(dtype)


@dataclass(frozen=True, slots=True)
class PackedStack:
    """A weight [N, K] of each of E experts in MXFP4, laid out for kernels: WIDTH columns of all rows, then the next.

    word i of a row   columns i, 16 + i, 32 + i, ... 112 + i of the WIDTH, 4 bits each, the first one lowest
    scale of a row    of columns 0-31, 32-63, 64-95, 96-127, 8 bits each, the first one lowest
    """

    values: torch.Tensor
    """int32[E, ceil((before + K) / WIDTH), N, WORDS]."""
    scales: torch.Tensor
    """int32[E, ceil((before + K) / WIDTH), N]."""
    columns: int
    """K."""
    before: int
    """Columns that stand before the first one, of those that share its scale: a rank's may begin within a block."""

    @classmethod
    def empty(
        cls, count: int, rows: int, columns: int, before: int = 0, device: torch.device | None = None
    ) -> PackedStack:
        shape = count, -(-(before + columns) // WIDTH), rows
        values, scales = (torch.empty(s, dtype=torch.int32, device=device) for s in ((*shape, WORDS), shape))
        return cls(values, scales, columns, before)

    def put(self, number: int, blocks: torch.Tensor, scales: torch.Tensor) -> None:
        """An expert's blocks uint8[N, B, 16] and scales uint8[N, B], B = ceil((before + K) / 32), of `fits`."""
        rows, count = scales.shape
        wanted = self.values.shape[1] * WIDTH // BLOCK
        # Columns past the end are zeros.
        blocks = torch.nn.functional.pad(blocks, (0, 0, 0, wanted - count))
        scales = torch.nn.functional.pad(scales, (0, wanted - count), value=LARGEST - 1)
        halves = torch.stack((blocks & 15, blocks >> 4), -1).view(rows, -1, WIDTH // WORDS, WORDS)
        self.values[number] = _joined(halves.transpose(2, 3), 4).transpose(0, 1)
        self.scales[number] = _joined(scales.view(rows, -1, WIDTH // BLOCK), 8).transpose(0, 1)

    def multiplied_out(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        """The weight [N, K] of an expert."""
        shifts = torch.arange(0, 32, 4, device=self.values.device)
        halves = (self.values[number][..., None] >> shifts & 15).transpose(-1, -2).flatten(-2)
        scales = self.scales[number][..., None] >> shifts[::2] & 255
        values = torch.tensor([*E2M1, *(-x for x in E2M1)], device=halves.device)[halves]
        powers = torch.exp2(scales.float() - 127).repeat_interleave(BLOCK, -1)
        whole = (values * powers).transpose(0, 1).flatten(1)
        return whole[:, self.before : self.before + self.columns].to(dtype)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def numel(self) -> int:
        """Of the weights, as a tensor has it."""
        return self.values.shape[0] * self.values.shape[2] * self.columns


def fits(scales: torch.Tensor) -> bool:
    """Whether a PackedStack can have these."""
    return int(scales.max()) <= LARGEST


def _joined(parts: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 of the last dimension's numbers, of so many bits each, the first one lowest."""
    shifts = torch.arange(0, 32, bits, device=parts.device)
    return (parts.long() << shifts).sum(-1).to(torch.int32)
