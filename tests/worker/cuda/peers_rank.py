"""One rank of a group on the CPU, in a process of its own; the ranks share memory by files.

python -m tests.worker.cuda.peers_rank FOLDER RANK RANKS COUNT
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import torch

from tests import interpreter

interpreter.prepare()

from radixrt.worker.cuda.comm.custom_all_reduce import CustomAllReduce, room_bytes  # noqa: E402

HIDDEN, MAX_ROWS, TILE = 48, 7, 32
DTYPE = torch.float16
"""Triton's interpreter rounds to float16 as a GPU does; conversions to bfloat16 truncate."""


def rooms(folder: Path, ranks: int) -> list[torch.Tensor]:
    """The memory of all ranks, mapped from files."""
    size, files = room_bytes(ranks, HIDDEN, MAX_ROWS, DTYPE), [str(folder / str(rank)) for rank in range(ranks)]
    return [torch.from_file(file, shared=True, size=size, dtype=torch.uint8) for file in files]


def added(residual: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """The expected result of `CustomAllReduce.add` for residual[rows, hidden] and parts[ranks, rows, hidden]."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return (residual.float() + total).to(residual.dtype)


def main(folder: Path, rank: int, ranks: int, count: int) -> None:
    peers = CustomAllReduce(rank, rooms(folder, ranks), HIDDEN, MAX_ROWS, DTYPE)
    same, own = random.Random(0), random.Random(rank)  # all ranks make the same calls, each at its own pace
    torch.manual_seed(0)
    for k in range(count):
        rows, shares, programs = same.randint(1, MAX_ROWS), same.random() < 0.5, same.randint(1, 4)
        parts = torch.randn(ranks, rows, HIDDEN).to(DTYPE)
        residual = torch.randn(rows, HIDDEN).to(DTYPE)
        expected = added(residual, parts)
        if own.random() < 0.3:
            time.sleep(0.02 * own.random())
        peers.buffer(k % 2, rows).copy_(parts[rank])
        peers._add(k % 2, rows, residual, shares, TILE, programs)
        assert torch.equal(residual, expected), (k, rows, shares, programs)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
