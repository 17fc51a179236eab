"""A tensor-parallel group on torch.distributed: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import logging
import os
import threading
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from radixrt.worker.model.layers.fp8 import Activations
from radixrt.worker.model.layers.norms import NoNorm, Norm, NormOps
from radixrt.worker.model.parallel.sharding import Shard

log = logging.getLogger("radixrt.ranks")

LEAVE_SECONDS = 5.0
"""How long a rank waits for the others when it leaves the group."""
WAIT_SECONDS = 1800.0
"""Timeout of collectives. It is long because other ranks may read weights more slowly; a rank whose process has ended
is noticed by `tensor_parallel.Followers`."""
# torch 2.13 renamed it.
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
BLOCK = 1 << 24
"""The most elements, of all ranks together, that an `exact` sum gathers at once."""


class TorchGroup:
    """Implements `model.parallel.group.Group` for one rank. If `exact`, a row of a sum does not depend on the number of
    rows: the ranks' parts are added in the order of ranks, in float32, and then to the residual."""

    def __init__(self, shard: Shard, device: torch.device, exact: bool) -> None:
        self.shard = shard
        self._device = device
        self._exact = exact

    def buffer(self, turn: int, residual: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(residual)

    def add(
        self, turn: int, part: torch.Tensor, residual: torch.Tensor, norm: Norm | NoNorm, ops: NormOps
    ) -> Activations:
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
        # With a single column flatten returns a view whose rows are not contiguous.
        return self._stacked(x).transpose(0, 1).flatten(1).contiguous()

    def _stacked(self, x: torch.Tensor) -> torch.Tensor:
        """Gather x[S, N] of all ranks as [ranks, S, N]."""
        found = torch.empty((self.shard.size * len(x), x.shape[1]), dtype=x.dtype, device=x.device)
        _all_gather(found, x.contiguous())
        return found.unflatten(0, (self.shard.size, len(x)))

    def broadcast(self, x: torch.Tensor) -> None:
        distributed.broadcast(x, 0)

    def smallest(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        found = torch.tensor(number, device=self._device)
        distributed.all_reduce(found, distributed.ReduceOp.MIN)
        return int(found)


def join(folder: Path, shard: Shard, device: torch.device) -> None:
    """Create this process' only group with the other ranks, which are on the same machine; `folder` is empty, and the
    same for all."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend, own = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    store = distributed.FileStore(str(folder / "ranks"), shard.size)  # type: ignore[attr-defined]  # not in __all__
    distributed.init_process_group(
        backend, store=store, rank=shard.rank, world_size=shard.size, device_id=own,
        timeout=timedelta(seconds=WAIT_SECONDS),
    )  # fmt: skip


def leave() -> None:
    """Undo `join`. NCCL ends a group only when all ranks leave it and no CUDA graph uses it, so this gives up after
    LEAVE_SECONDS. Idempotent."""
    if not distributed.is_initialized():
        return
    leaving = threading.Thread(target=distributed.destroy_process_group, name="leave", daemon=True)
    leaving.start()
    leaving.join(LEAVE_SECONDS)
    if leaving.is_alive():
        log.warning("the group of ranks does not end in %.0f s: left as it is", LEAVE_SECONDS)
