"""The store's face: what its caller's thread calls."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from radixrt.worker.disk.block import Block, Changes, Job, NewBlock, StoreState


class DiskStore:
    """Blocks in `folder`, at most `size` bytes with all its files, whoever wrote them.

    fingerprint  of all that decides what rows mean: weights, dtypes, layout, page size, scales, RoPE, ranks, format.
                 Blocks of others are not seen; they count, and go first once nobody has used theirs for a while.
    rank, ranks  of a tensor-parallel group
    key          the content of a key file: rows, ids and namespaces are encrypted (AES-256-GCM) with keys derived from
                 it. Blocks under another key are as of another fingerprint.
    min_free     bytes of the file system that are left free; by default 5% of it, at most 10 GiB

    Raises ValueError, which names `kv_disk_path`, `kv_disk_size` or `kv_disk_key_file`, if the folder cannot be made or
    written, the size is too small or `cryptography` is not installed. Not if what the folder has is damaged.
    """

    def __init__(
        self,
        folder: Path,
        size: int,
        fingerprint: str,
        *,
        rank: int = 0,
        ranks: int = 1,
        key: bytes | None = None,
        min_free: int | None = None,
    ) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as e:
            raise ValueError(f"kv_disk_path: {folder}: {e.strerror}") from e
        self.size = size
        self._lock = threading.Lock()
        self._next = int.from_bytes(os.urandom(5), "little") << 23
        self._blocks: dict[int, Block] = {}
        self._bytes: dict[int, np.ndarray] = {}
        self._changes = Changes([], [], [])

    @property
    def state(self) -> StoreState:
        return StoreState.OK

    @property
    def backlog(self) -> int:
        """Bytes of writes that have not ended. Beyond `MAX_BACKLOG_BYTES` writes are refused."""
        return 0

    @property
    def used(self) -> int:
        """Bytes of all blocks of the folder, as of the last look."""
        return sum(len(x) for x in self._bytes.values())

    def rates(self) -> tuple[float, float]:
        """(read, written), bytes a second that the disk gave while it was busy, lately; 0: not known yet."""
        return 0.0, 0.0

    def blocks(self, seconds: float = 30.0) -> list[Block]:
        """All blocks of this fingerprint, parents first. Waits `seconds` at most for the index to be read; what is not
        there by then comes by `poll` as added. To be called once, before `poll`."""
        return []

    def poll(self) -> Changes:
        """What happened since the last call. Costs next to nothing if nothing did."""
        changes, self._changes = self._changes, Changes([], [], [])
        return changes

    def write(self, block: NewBlock, array: np.ndarray, slots: Iterable[int] | np.ndarray) -> Job:
        """Write `array[slots]`, uint8[n, row bytes], as a block of all n rows. Of rank 0 of a group: see the package.
        The job has the block's number at once."""
        with self._lock:
            self._next += 1
            number = self._next
        rows = array[np.asarray(slots)]
        self._blocks[number] = Block(number, *block, nbytes=rows.nbytes)
        self._bytes[number] = rows.reshape(-1).copy()
        return self._ended(Job("write", number, rows.nbytes))

    def write_part(self, number: int, array: np.ndarray, slots: Iterable[int] | np.ndarray) -> Job:
        """Write a rank's part of the block that rank 0 writes under `number`."""
        self._bytes[number] = array[np.asarray(slots)].reshape(-1).copy()
        return self._ended(Job("write", number, self._bytes[number].nbytes))

    def read(self, number: int, array: np.ndarray, slots: Iterable[int] | np.ndarray, first: int = 0) -> Job:
        """Read rows [first, first + len(slots)) of a block into `array[slots]`, uint8[n, row bytes]. The whole block is
        read and verified. A block that does not verify is dropped, with those that come after it."""
        job = Job("read", number)
        slots = np.asarray(slots)
        begin, size = first * array.shape[1], len(slots) * array.shape[1]
        found = self._bytes.get(number)
        if found is None or begin + size > len(found):
            return self._ended(job, "missing")
        array[slots] = found[begin : begin + size].reshape(len(slots), -1)
        job.nbytes = size
        return self._ended(job)

    def touch(self, numbers: Iterable[int], value: float | None = None) -> None:
        """Give blocks a value; None: now, in seconds of the epoch. Unknown numbers are ignored."""
        value = time.time() if value is None else value
        for number in numbers:
            if number in self._blocks:
                self._blocks[number] = self._blocks[number]._replace(value=value)

    def delete(self, numbers: Iterable[int]) -> Job:
        """Delete blocks and all that come after them."""
        gone = set(numbers) & self._blocks.keys()
        while more := {n for n, b in self._blocks.items() if b.parent in gone} - gone:
            gone |= more
        job = Job("delete")
        for number in gone:
            del self._blocks[number]
            job.nbytes += len(self._bytes.pop(number))
        self._changes.removed.extend(gone)
        return self._ended(job)

    def delete_namespaces(self, prefix: str) -> Job:
        """Delete the blocks, of all fingerprints, of all namespaces whose key begins with `prefix`, and those being
        written. A tenant's are `Namespace(tenant).key.partition("\\n")[0] + "\\n"`. Blocks under another key go as
        well: whose they are cannot be read."""
        return self.delete([n for n, b in self._blocks.items() if b.namespace.startswith(prefix)])

    def flush(self, seconds: float = 10.0) -> bool:
        """Wait for all jobs to end, for `seconds` at most. Whether they did."""
        return True

    def close(self, seconds: float = 1.0) -> None:
        """End: writes not begun are dropped, and those begun have `seconds` to end. A thread that hangs is left behind;
        it holds up neither this nor the end of the process."""

    def _ended(self, job: Job, why: str = "") -> Job:
        job.ok, job.why = not why, why
        self._changes.finished.append(job)
        return job
