"""A tensor-parallel group whose ranks are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from radixrt.worker.model.parallel.sharding import Shard


class ThreadGroup:
    """Sums in the order of ranks. Each `room` is a new tensor, so that writing to it cannot change an earlier sum."""

    def __init__(self, shard: Shard, meeting: threading.Barrier, table: list[Any]) -> None:
        self.shard = shard
        self.turns: list[int] = []
        self._meeting = meeting
        self._table = table

    def _all(self, mine: torch.Tensor) -> list[torch.Tensor]:
        self._table[self.shard.rank] = mine
        self._meeting.wait(30)
        found = list(self._table)
        self._meeting.wait(30)
        return found

    def buffer(self, turn: int, residual: torch.Tensor) -> torch.Tensor:
        self.turns.append(turn)
        return torch.full_like(residual, torch.nan)

    def add(self, turn, part, residual, norm, ops):
        assert turn == self.turns[-1]
        residual += sum(self._all(part.clone()))
        return norm(residual, ops)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._all(x), 1)

    def broadcast(self, x: torch.Tensor) -> None:
        x.copy_(self._all(x.clone())[0])


def on_ranks(size: int, act: Callable[[ThreadGroup], Any]) -> list[Any]:
    """Run `act` on each rank, in threads. Returns the results by rank."""
    meeting, table = threading.Barrier(size), [None] * size

    def run(rank: int) -> Any:
        try:
            return act(ThreadGroup(Shard(rank, size), meeting, table))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    for problem in [future.exception() for future in futures]:
        if problem and not isinstance(problem, threading.BrokenBarrierError):
            raise problem
    return [future.result() for future in futures]
