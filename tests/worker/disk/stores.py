"""Stores that are quick to notice, and blocks whose bytes follow from what they are of."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

import numpy as np

from radixrt.worker.disk import Block, Changes, DiskStore, Job, NewBlock
from radixrt.worker.disk.files import aligned
from radixrt.worker.disk.limits import Limits
from tests.waiting import eventually

QUICK = Limits(
    tick_seconds=0.01, slow_seconds=2.0, retry_seconds=0.1, touch_seconds=0.0, upkeep_seconds=0.05, ranks_seconds=20.0
)
WIDTH = 1000
"""Bytes of a row."""
SPACE = "tenant\nmodel\n\n"


def opened(
    folder: Path, size: int = 64 << 20, fingerprint: str = "model", limits: Limits = QUICK, **options
) -> DiskStore:
    return DiskStore(folder, size, fingerprint, limits=limits, **{"min_free": 0, **options})


def content(path: bytes, rows: int, rank: int = 0, width: int = WIDTH) -> np.ndarray:
    """uint8[rows, width] that nothing else has: of a path's digest."""
    seed = int.from_bytes(blake2b(path + bytes([rank]), digest_size=8).digest(), "little")
    return np.random.default_rng(seed).integers(0, 256, (rows, width), dtype=np.uint8)


def ids_of(*numbers: int) -> bytes:
    return np.array(numbers, np.int32).tobytes()


def path_of(block: NewBlock | Block, parent: bytes) -> bytes:
    """What a block is of, from what its parent is of."""
    return blake2b(f"{block.kind} {block.namespace} {block.start} ".encode() + parent + block.ids).digest()


def put(store: DiskStore, block: NewBlock, parent: bytes = b"", rows: int = 4) -> tuple[Job, bytes]:
    """Write it. Returns the job and the path."""
    path = path_of(block, parent)
    return store.write(block, content(path, rows), range(rows)), path


def drained(store: DiskStore) -> Changes:
    """All that came of what was asked."""
    assert store.flush(30)
    return store.poll()


def got(store: DiskStore, number: int, rows: int = 4, width: int = WIDTH) -> np.ndarray | None:
    """The rows of a block; None: a miss."""
    out = np.zeros((rows, width), np.uint8)
    job = store.read(number, out, range(rows))
    assert store.flush(30)
    assert job.ok is not None
    return out if job.ok else None


def paths(blocks: list[Block]) -> dict[int, bytes]:
    """What blocks are of, by number. Their parents come first, or this fails."""
    found: dict[int, bytes] = {}
    for block in blocks:
        assert block.parent is None or block.parent in found, "a block before its parent"
        found[block.number] = path_of(block, b"" if block.parent is None else found[block.parent])
    return found


def bytes_of(folder: Path) -> int:
    """What a folder's files take of the disk."""
    total = 0
    for home, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(Path(home) / name).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("fp-*/*.kv"))


def extents(blocks: list[Block], overhead: int = 0) -> int:
    return sum(aligned(x.nbytes + overhead) for x in blocks)


def _bytes_of_segments(folder: Path) -> int:
    """Without what the file system itself adds for each."""
    return sum(x.stat().st_blocks * 512 - 8192 for x in segments(folder))


def check_truth(folder: Path, size: int = 64 << 20, **options) -> list[Block]:
    """Whoever opens the folder now finds what is there, every byte of it right, and nothing beside."""
    store = opened(folder, size, **options)
    blocks = store.blocks()
    for number, path in paths(blocks).items():
        block = next(x for x in blocks if x.number == number)
        rows = block.nbytes // WIDTH
        found = got(store, number, rows)
        assert found is not None, "a block of the index cannot be read"
        np.testing.assert_array_equal(found, content(path, rows))
    eventually(lambda: store.used == extents(blocks))  # what others left is freed after it was opened
    eventually(lambda: _bytes_of_segments(folder) <= store.used)
    assert store.poll().removed == []
    store.close()
    return blocks
