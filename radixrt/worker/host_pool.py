"""Host memory for evicted pages: see `host`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from radixrt.config import WorkerConfig, gpu_count
from radixrt.worker.kv import KVPool, zeros
from radixrt.worker.memory import available_bytes
from radixrt.worker.plan import Moves

if TYPE_CHECKING:
    from radixrt.worker.group import TorchGroup

MEMORY_SHARE = 0.25
"""Share of the available memory of a machine that is used by default, by all its GPUs together."""


class HostPool:
    """Slots of a page of `pool` each, all its layers, as many as fit in `memory`, uint8[bytes]; with a group as many on
    all ranks. Slot 0 is not used."""

    def __init__(self, pool: KVPool, page_size: int, memory: torch.Tensor, group: TorchGroup | None = None) -> None:
        planes = pool.planes(page_size)
        if len({x.dtype for x in planes}) > 1:
            planes = [x.view(torch.uint8) for x in planes]
        dtype, words = planes[0].dtype, sum(len(x) * x.shape[2] for x in planes)
        self.slots = len(memory) // (words * dtype.itemsize)
        if group is not None:
            self.slots = group.smallest(self.slots)
        self._planes = planes
        self._host = memory[: self.slots * words * dtype.itemsize].view(dtype).view(self.slots, words)
        """What a page has in one plane after the other."""

    @property
    def nbytes(self) -> int:
        return self._host.nbytes

    def arrive(self) -> None:
        """Let the next step wait for copies that the one before did not wait for."""

    def move(self, moves: Moves, wait: bool = True) -> None:
        """Do the copies of a step, in order with the work of the device. With `wait` the step waits for what comes
        back; otherwise the next one does (`arrive`)."""
        (page, slot), (held, to) = (torch.from_numpy(x.astype(np.int64)) for x in (moves.out, moves.back))
        self._host[slot] = torch.cat([x[:, page].transpose(0, 1).flatten(1) for x in self._planes], 1)
        rows, begin = self._host[held], 0
        for x in self._planes:
            end = begin + len(x) * x.shape[2]
            x[:, to] = rows[:, begin:end].unflatten(1, (len(x), x.shape[2])).transpose(0, 1)
            begin = end


def host_bytes(config: WorkerConfig, recurrent: bool, device: torch.device, ranks: int = 1) -> int:
    """The bytes of host memory of each rank that `kv_offloading_size` asks for. Raises ValueError if there are not so
    many, or if they could not be used."""
    asked = config.kv_offloading_size
    if asked == "none" or (asked == "auto" and (recurrent or device.type == "cpu")):
        return 0
    if recurrent:
        raise ValueError("kv_offloading_size: pages of models with recurrent states are not kept in host memory")
    available = available_bytes()
    if asked == "auto":
        most = torch.cuda.mem_get_info(device)[1]
        return min(most, int(MEMORY_SHARE * available) // max(1, gpu_count()))
    size = int(float(asked) * (1 << 30)) // ranks
    if size > available:
        raise ValueError(f"kv_offloading_size: {size / 1e9:.1f} GB, of {available / 1e9:.1f} GB that are available")
    return size


def plain_memory(size: int) -> torch.Tensor:
    """uint8[size] of memory that is allocated when it is first written."""
    return zeros((size,), torch.uint8, torch.device("cpu"))
