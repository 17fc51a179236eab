"""Host memory for evicted pages: see `host`."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from radixrt.config import WorkerConfig, gpu_count
from radixrt.worker.kv import KVPool
from radixrt.worker.memory import available_bytes
from radixrt.worker.plan import Moves

if TYPE_CHECKING:
    from radixrt.worker.group import TorchGroup

log = logging.getLogger("radixrt.worker")

MEMORY_SHARE = 0.25
"""Share of the available memory of a machine that is used by default, by all its GPUs together."""


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


def make_host(config: WorkerConfig, pool: KVPool, recurrent: bool, group: TorchGroup | None) -> HostPool | None:
    """The host memory that `kv_offloading_size` asks for; None if there is none. It has as many slots on all ranks.
    Raises ValueError if the memory cannot be had, or could not be used."""
    asked, on_gpu = config.kv_offloading_size, pool.device.type == "cuda"
    if asked == "none" or (asked == "auto" and (recurrent or not on_gpu)):
        return None
    if recurrent:
        raise ValueError("kv_offloading_size: pages of models with recurrent states are not kept in host memory")
    available = available_bytes()
    if asked == "auto":
        size = min(pool.nbytes, int(MEMORY_SHARE * available) // max(1, gpu_count()))
    else:
        size = int(float(asked) * (1 << 30)) // (group.shard.size if group else 1)
        if size > available:
            asked_for, there = f"{size / 1e9:.1f} GB", f"{available / 1e9:.1f} GB"
            raise ValueError(f"kv_offloading_size: {asked_for}, of {there} that are available")
    slots = size // page_bytes(pool, config.page_size)
    slots = slots if group is None else group.smallest(slots)
    if slots < 1:
        return None
    kind = HostPool
    if on_gpu:
        from radixrt.worker.cuda.host_pool import CudaHostPool as kind
    try:
        return kind(pool, config.page_size, slots + 1)
    except ValueError as error:
        if asked != "auto" or group is not None:
            raise ValueError(f"kv_offloading_size: {error}") from error
        log.warning("evicted pages are not kept: %s", error)
        return None


def _indices(moves: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.from_numpy(x.astype(np.int64)) for x in moves)
