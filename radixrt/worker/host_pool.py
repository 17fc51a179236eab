"""Host memory for evicted pages: see `host`."""

from __future__ import annotations

import math

import numpy as np
import torch

from radixrt.worker.kv import KVPool
from radixrt.worker.plan import Moves


class HostPool:
    """`slots` slots of a page of `pool` each, all its layers, in host memory. Slot 0 is not used."""

    def __init__(self, pool: KVPool, page_size: int, slots: int) -> None:
        self.slots = slots
        self._planes = pool.planes(page_size)
        self._host = [torch.from_numpy(np.zeros((slots, len(x), x.shape[2]), x.numpy().dtype)) for x in self._planes]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self._host)

    def move(self, moves: Moves) -> None:
        """Do the copies of a step, in order with the work of the device."""
        page, slot = _indices(moves.out)
        held, to = _indices(moves.back)
        for planes, host in zip(self._planes, self._host, strict=True):
            host[slot] = planes[:, page].transpose(0, 1)
            planes[:, to] = host[held].transpose(0, 1)


def page_bytes(pool: KVPool, page_size: int) -> int:
    """Bytes of a page, all layers."""
    return sum(math.prod((len(x), x.shape[2], x.itemsize)) for x in pool.planes(page_size))


def _indices(moves: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.from_numpy(x.astype(np.int64)) for x in moves)
