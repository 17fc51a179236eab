"""Packs all that a step needs from the host into one buffer of pinned memory, so that it takes one copy."""

from __future__ import annotations

import math

import numpy as np
import torch

ALIGN = 8
"""Arrays begin at multiples of this many integers, 32 bytes, so that kernels are compiled for one alignment."""


class Packer:
    """Collects int32 arrays for one copy. It must not be reused before the last copy is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._used = 0
        self._make(1 << 16)

    def _make(self, room: int) -> None:
        self._room = room
        self._host = torch.empty(room, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        self._view = self._host.numpy()

    def _grow(self, room: int) -> None:
        before = self._host[: self._used]
        self._make(room)
        self._host[: self._used] = before

    @property
    def used(self) -> int:
        """Integers packed so far."""
        return self._used

    def clear(self) -> None:
        self._used = 0

    def add(self, values: np.ndarray, room: int | None = None, fill: int = 0) -> PackedArray:
        """Append an array of int32, int64 or float32, of any shape; with `room`, padded with `fill` to that many rows.

        Each int64 becomes two integers, in a new last dimension."""
        rows = len(values) if room is None else room
        if values.dtype == np.int64:
            values = values.view(np.int32).reshape(*values.shape, 2)
        elif values.dtype == np.float32:
            values = values.view(np.int32)
        assert values.dtype == np.int32, values.dtype
        assert len(values) <= rows, f"{len(values)} of {rows}"
        shape = (rows, *values.shape[1:])
        size, begin = math.prod(shape), self._used
        end = begin + -(-size // ALIGN) * ALIGN
        if end > self._room:
            self._grow(2 * end)
        flat = self._view[begin : begin + size]
        flat[: values.size] = values.reshape(-1)
        flat[values.size :] = fill
        self._used = end
        return PackedArray(begin, shape)

    def send(self, target: torch.Tensor | None = None) -> torch.Tensor:
        """Copy the packed integers to the device, to a new tensor or the beginning of `target`, without waiting."""
        if target is None:
            target = torch.empty(self._used, dtype=torch.int32, device=self._device)
        target[: self._used].copy_(self._host[: self._used], non_blocking=True)
        return target


class PackedArray:
    """Offset and shape of an array in what a Packer sends."""

    __slots__ = ("begin", "shape", "size")

    def __init__(self, begin: int, shape: tuple[int, ...]) -> None:
        self.begin = begin
        self.shape = shape
        self.size = math.prod(shape)

    def of(self, sent: torch.Tensor) -> torch.Tensor:
        """A view of the array, int32, in the tensor that `Packer.send` returned."""
        return sent[self.begin : self.begin + self.size].view(self.shape)


def of_maybe(packed: PackedArray | None, sent: torch.Tensor) -> torch.Tensor | None:
    """`PackedArray.of`, if there is an array."""
    return None if packed is None else packed.of(sent)
