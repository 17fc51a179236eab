"""What a step needs of the host, in one copy: integers packed side by side in pinned memory."""

from __future__ import annotations

import math

import numpy as np
import torch

ALIGN = 8
"""Integers: pieces begin at multiples of 32 bytes, so that kernels are compiled for one alignment."""


class Packer:
    """Collects int32 arrays for one copy. Use it again only when the copy before has been made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._room = 0
        self._used = 0
        self._grow(1 << 16)

    def _grow(self, room: int) -> None:
        before = self._room and self._host[: self._used].clone()
        self._room = room
        self._host = torch.empty(room, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        self._view = self._host.numpy()
        if self._used:
            self._host[: self._used] = before

    @property
    def used(self) -> int:
        """Integers packed so far."""
        return self._used

    def clear(self) -> None:
        self._used = 0

    def add(self, values: np.ndarray, room: int | None = None, fill: int = 0) -> Piece:
        """Append an array of integers of any shape, or of float32; with `room`, so many rows, the rest of them `fill`.

        int64 becomes two integers each, of a last dimension of its own."""
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
        return Piece(begin, shape)

    def send(self, target: torch.Tensor | None = None) -> torch.Tensor:
        """The packed integers on the device, in a new tensor or at the beginning of `target`; the host goes on."""
        if target is None:
            target = torch.empty(self._used, dtype=torch.int32, device=self._device)
        target[: self._used].copy_(self._host[: self._used], non_blocking=True)
        return target


class Piece:
    """Where an array lies in what was sent."""

    __slots__ = ("begin", "shape", "size")

    def __init__(self, begin: int, shape: tuple[int, ...]) -> None:
        self.begin = begin
        self.shape = shape
        self.size = math.prod(shape)

    def of(self, sent: torch.Tensor) -> torch.Tensor:
        """int32, on the device."""
        return sent[self.begin : self.begin + self.size].view(self.shape)
