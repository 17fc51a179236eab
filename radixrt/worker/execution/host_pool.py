"""Host memory for evicted pages, and for checkpoints of recurrent states: see `host_tier` and
`host_recurrent_states`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from radixrt.config import WorkerConfig, gpu_count
from radixrt.worker.execution.kv_pool import KVPool, StatePool, zeros
from radixrt.worker.execution.memory import available_bytes
from radixrt.worker.execution.pool_sizes import num_states
from radixrt.worker.model.parallel.sharding import Shard
from radixrt.worker.plan import Moves

if TYPE_CHECKING:
    from radixrt.worker.parallel.group import TorchGroup

MEMORY_SHARE = 0.25
"""Share of the available memory of a machine that is used by default, by all its GPUs together."""


class HostPool:
    """Slots of a page of `pool` each, all its layers, and slots of one of `states` each, if the model has any:
    `num_states` of `memory`, uint8[bytes], at most `most_states`, and as many pages as fit beside them. With a group
    there are as many on all ranks. Slots 0 are not used."""

    def __init__(
        self,
        pool: KVPool,
        page_size: int,
        memory: torch.Tensor,
        group: TorchGroup | None = None,
        states: StatePool | None = None,
        most_states: int = 0,
    ) -> None:
        self.num_states = 0
        """Slots of states, slot 0, which has no memory, included; 0: the model has none."""
        self._state_planes: list[torch.Tensor] = []
        self._states = memory[:0].view(0, 0)
        """uint8[num_states - 1, bytes]: what slot 1, 2, ... of a state has in one plane after the other."""
        if states is not None:
            self._state_planes = states.planes()
            size = sum(x.shape[1] for x in self._state_planes)
            count = _smallest(group, num_states(len(memory), size, most_states))
            self.num_states = count + 1
            self._states = memory[len(memory) - count * size :].view(count, size)
            memory = memory[: len(memory) - count * size]
        planes = pool.planes(page_size)
        if len({x.dtype for x in planes}) > 1:
            planes = [x.view(torch.uint8) for x in planes]
        dtype, words = planes[0].dtype, sum(len(x) * x.shape[2] for x in planes)
        self.slots = _smallest(group, len(memory) // (words * dtype.itemsize))
        self._planes = planes
        self._host = memory[: self.slots * words * dtype.itemsize].view(dtype).view(self.slots, words)
        """What a page has in one plane after the other."""

    @property
    def nbytes(self) -> int:
        return self._host.nbytes + self._states.nbytes

    @property
    def is_usable(self) -> bool:
        """Whether there are slots for pages and, if the model has states, for states."""
        return self.slots > 1 and self.num_states != 1

    def rows(self) -> tuple[np.ndarray, np.ndarray | None]:
        """The same memory as rows of bytes: those of pages, uint8[slots, bytes], and of states, uint8[num_states - 1,
        bytes], slot 1 first; None: there are none."""
        states = self._states.numpy() if self.num_states else None
        return self._host.view(torch.uint8).numpy(), states

    def settled(self) -> Callable[[], bool]:
        """A function that tells whether all copies that were begun by now have ended."""
        return _at_once

    def arrive(self) -> None:
        """Let the next step wait for copies that the one before did not wait for."""

    def move(self, moves: Moves, wait: bool = True) -> None:
        """Do the copies of a step, in order with the work of the device. With `wait` the step waits for what comes
        back; otherwise the next one does (`arrive`)."""
        (page, slot), (held, to) = (torch.from_numpy(x.astype(np.int64)) for x in (moves.offload, moves.onload))
        self._host[slot] = torch.cat([x[:, page].transpose(0, 1).flatten(1) for x in self._planes], 1)
        rows, begin = self._host[held], 0
        for x in self._planes:
            end = begin + len(x) * x.shape[2]
            x[:, to] = rows[:, begin:end].unflatten(1, (len(x), x.shape[2])).transpose(0, 1)
            begin = end
        for source, slot in moves.states_offload.T.tolist():
            for x, there in self._state_parts(slot):
                there.copy_(x[source])
        for slot, target in moves.states_onload.T.tolist():
            for x, there in self._state_parts(slot):
                x[target] = there

    def _state_parts(self, slot: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The planes of states, uint8[slots, bytes], and where a slot here has its part of each, uint8[bytes]."""
        return zip(
            self._state_planes, self._states[slot - 1].split([x.shape[1] for x in self._state_planes]), strict=True
        )


def _at_once() -> bool:
    return True


def _smallest(group: TorchGroup | None, number: int) -> int:
    return number if group is None else group.smallest(number)


def host_bytes(config: WorkerConfig, device: torch.device, shard: Shard = Shard()) -> int:  # noqa: B008
    """The bytes of host memory of a rank that `kv_offloading_size` asks for. Raises ValueError if there are not so
    many, on rank 0 for all ranks together."""
    asked = config.kv_offloading_size
    if asked == "none" or (asked == "auto" and device.type == "cpu"):
        return 0
    available = available_bytes()
    if asked == "auto":
        most = torch.cuda.mem_get_info(device)[1]
        return min(most, int(MEMORY_SHARE * available) // max(1, gpu_count()))
    size = int(float(asked) * (1 << 30)) // shard.size
    needed = size if shard.rank else size * shard.size  # other ranks may have theirs already
    if needed > available:
        raise ValueError(f"kv_offloading_size: {needed / 1e9:.1f} GB, of {available / 1e9:.1f} GB that are available")
    return size


def plain_memory(size: int) -> torch.Tensor:
    """uint8[size] of memory that is allocated when it is first written."""
    return zeros((size,), torch.uint8, torch.device("cpu"))
