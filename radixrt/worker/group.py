"""A tensor-parallel group by torch.distributed: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import logging
import os
import threading
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from radixrt.worker.model.layers import Norm, Ops
from radixrt.worker.model.scaled import Rounded
from radixrt.worker.model.sharding import Shard

log = logging.getLogger("radixrt.ranks")

LEAVE_SECONDS = 5.0
"""For all ranks to leave."""
WAIT_SECONDS = 1800.0
"""For other ranks, which may read weights more slowly; those that have ended are noticed otherwise."""
# torch 2.13 has another name for it.
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
BLOCK = 1 << 24
"""Elements of a sum, all ranks together, that are gathered at once where its order is fixed."""


class TorchGroup:
    """A rank's end of `model.parallel.Group`. A row of an `exact` sum does not depend on how many rows there are: the
    parts are added in the order of the ranks, and then to the residual."""

    def __init__(self, shard: Shard, device: torch.device, exact: bool) -> None:
        self.shard = shard
        self._device = device
        self._exact = exact

    def room(self, turn: int, residual: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(residual)

    def add(
        self, turn: int, part: torch.Tensor, residual: torch.Tensor, norm: Norm, ops: Ops
    ) -> torch.Tensor | Rounded:
        self._sum(part, residual)
        return norm(residual, ops)

    def _sum(self, part: torch.Tensor, residual: torch.Tensor) -> None:
        if not self._exact:
            distributed.all_reduce(part)
            residual.add_(part)
            return
        rows = max(1, BLOCK // (self.shard.size * part.shape[1]))
        for mine, theirs in zip(part.split(rows), residual.split(rows), strict=True):
            first, *others = self._stacked(mine)
            total = first.float()
            for one in others:
                total += one
            theirs.copy_(theirs.float() + total)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        # Of a single column flatten gives a view, whose rows do not lie side by side.
        return self._stacked(x).transpose(0, 1).flatten(1).contiguous()

    def _stacked(self, x: torch.Tensor) -> torch.Tensor:
        """x[S, N] of all ranks: [ranks, S, N]."""
        found = torch.empty((self.shard.size * len(x), x.shape[1]), dtype=x.dtype, device=x.device)
        _all_gather(found, x.contiguous())
        return found.unflatten(0, (self.shard.size, len(x)))

    def broadcast(self, x: torch.Tensor) -> None:
        distributed.broadcast(x, 0)

    def smallest(self, number: int) -> int:
        """Of what all ranks say."""
        found = torch.tensor(number, device=self._device)
        distributed.all_reduce(found, distributed.ReduceOp.MIN)
        return int(found)


def join(folder: Path, shard: Shard, device: torch.device) -> None:
    """Meet the other ranks, all of this machine, in an empty folder that they share. A process is in one group."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend, own = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    store = distributed.FileStore(str(folder / "ranks"), shard.size)
    distributed.init_process_group(
        backend, store=store, rank=shard.rank, world_size=shard.size, device_id=own,
        timeout=timedelta(seconds=WAIT_SECONDS),
    )  # fmt: skip


def leave() -> None:
    """The other end of `join`; NCCL's ranks leave together, when the graphs that hold some of it are gone. If others do
    not come, this one goes alone. Idempotent."""
    if not distributed.is_initialized():
        return
    leaving = threading.Thread(target=distributed.destroy_process_group, name="leave", daemon=True)
    leaving.start()
    leaving.join(LEAVE_SECONDS)
    if leaving.is_alive():
        log.warning("the group of ranks does not end in %.0f s: left as it is", LEAVE_SECONDS)
