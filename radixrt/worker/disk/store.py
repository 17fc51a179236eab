"""The store's face: what its caller's thread calls."""

from __future__ import annotations

import errno
import itertools
import secrets
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from radixrt.worker.disk.block import Block, Changes, Job, NewBlock, StoreState
from radixrt.worker.disk.files import Files
from radixrt.worker.disk.health import Clocks, Health, write_trouble
from radixrt.worker.disk.inbox import Inbox
from radixrt.worker.disk.ledger import Ledger
from radixrt.worker.disk.limits import Limits
from radixrt.worker.disk.manager import Manager
from radixrt.worker.disk.seals import BadSeal, Seals, check_key
from radixrt.worker.disk.session import Setting
from radixrt.worker.disk.space import Space
from radixrt.worker.disk.tasks import GivenUp, IoThreads, Place, Read, Task, Write

MIN_BYTES = 4 << 20
_TRY_SECONDS = 10.0
_LOST = {errno.ENOENT, errno.EIO, errno.ENODATA}
"""With which a read says that bytes are gone for good."""


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
        limits: Limits = Limits(),  # noqa: B008
        files: Files | None = None,
    ) -> None:
        if size < MIN_BYTES:
            raise ValueError(f"kv_disk_size: less than {MIN_BYTES >> 20} MiB")
        if key is not None:
            check_key(key)
        folder = Path(folder).absolute()
        files = Files() if files is None else files
        _try(folder)
        self.size = size
        self._limits = limits
        self._ledger = Ledger()
        self._clocks = Clocks()
        self._health = Health(folder, limits.retry_seconds)
        self._inbox = Inbox()
        self._places: dict[int, Place] = {}
        self._numbers = itertools.count(secrets.randbits(40) << 23)  # nobody else has them
        self._is_slow = False
        self._is_closed = False
        seals = Seals(fingerprint, rank, ranks, key)
        self._readers = IoThreads("disk-read", limits.readers, files, seals, self._clocks, self._has_read)
        self._writers = IoThreads("disk-write", limits.writers, files, seals, self._clocks, self._has_written)
        segment_bytes = min(limits.segment_bytes, max(1 << 20, size // 32))
        self._space = Space(folder, size, files, limits.unused_seconds, min_free)
        setting = Setting(
            folder=folder,
            files=files,
            seals=seals,
            rank=rank,
            ranks=ranks,
            limits=limits._replace(segment_bytes=segment_bytes),
            space=self._space,
            ledger=self._ledger,
            clocks=self._clocks,
            inbox=self._inbox,
            places=self._places,
            start_write=self._writers.put,
            start_read=self._readers.put,
        )
        self._manager = Manager(setting, self._health)
        self._manager.start()

    @property
    def state(self) -> StoreState:
        self._watch()
        return StoreState.SLOW if self._is_slow else self._health.state

    @property
    def backlog(self) -> int:
        """Bytes of writes that have not ended. Beyond `Limits.backlog_bytes` writes are refused."""
        return self._ledger.backlog

    @property
    def used(self) -> int:
        """Bytes of all blocks of the folder, as of the last look."""
        return self._space.used

    def rates(self) -> tuple[float, float]:
        """(read, written), bytes a second that came of it while anything was under way, of late; 0: not known yet."""
        return self._readers.rate.value, self._writers.rate.value

    def blocks(self, seconds: float = 30.0) -> list[Block]:
        """All blocks of this fingerprint, parents first. Waits `seconds` at most for the index to be read; what is not
        there by then comes by `poll` as added. To be called once, before `poll`."""
        self._manager.loaded.wait(seconds)
        return self._ledger.take_added()

    def poll(self) -> Changes:
        """What happened since the last call. Costs next to nothing if nothing did."""
        self._watch()
        return Changes([], [], []) if self._ledger.is_empty else self._ledger.take()

    def write(self, block: NewBlock, array: np.ndarray, slots: Iterable[int] | np.ndarray) -> Job:
        """Write `array[slots]`, uint8[n, row bytes], as a block of all n rows. Of rank 0 of a group: see the package.
        The job has the block's number at once."""
        return self._write(next(self._numbers), block, array, slots)

    def write_part(self, number: int, array: np.ndarray, slots: Iterable[int] | np.ndarray) -> Job:
        """Write a rank's part of the block that rank 0 writes under `number`."""
        return self._write(number, None, array, slots)

    def read(self, number: int, array: np.ndarray, slots: Iterable[int] | np.ndarray, first: int = 0) -> Job:
        """Read rows [first, first + len(slots)) of a block into `array[slots]`, uint8[n, row bytes]. The whole block is
        read and verified. A block that does not verify is dropped, with those that come after it."""
        rows = _checked(array, slots)
        task = Read(Job("read", number, len(rows) * array.shape[1]), array, rows, first)
        self._ledger.begin(task.job, task)
        state = self.state
        place, session = self._places.get(number), self._manager.session
        if self._is_closed or state in (StoreState.SLOW, StoreState.GONE):
            self._ledger.end(task.job, "closed" if self._is_closed else state.value)
        elif place is None or session is None:
            self._inbox.look_up(task)
        else:
            session.read(task, place)
        return task.job

    def touch(self, numbers: Iterable[int], value: float | None = None) -> None:
        """Give blocks a value; None: now, in seconds of the epoch. Unknown numbers are ignored."""
        self._inbox.touch(numbers, time.time() if value is None else value)

    def delete(self, numbers: Iterable[int]) -> Job:
        """Delete blocks and all that come after them."""
        return self._delete(list(numbers))

    def delete_namespaces(self, prefix: str) -> Job:
        """Delete the blocks, of all fingerprints, of all namespaces whose key begins with `prefix`, and those being
        written. A tenant's are `Namespace(tenant).key.partition("\\n")[0] + "\\n"`. Blocks under another key go as
        well: whose they are cannot be read. If it is not ok it is to be asked again."""
        return self._delete(prefix)

    def flush(self, seconds: float = 10.0) -> bool:
        """Wait for all jobs to end, for `seconds` at most. Whether they did."""
        end = time.monotonic() + seconds
        while not self._ledger.is_idle:
            self._watch()
            if time.monotonic() > end:
                return False
            time.sleep(0.001)
        return True

    def close(self, seconds: float = 1.0) -> None:
        """End: writes not begun are dropped, and those begun have `seconds` to end. A thread that hangs is left behind;
        it holds up neither this nor the end of the process."""
        if self._is_closed:
            return
        self._is_closed = True
        self._manager.stop(seconds)
        self._readers.stop()
        self._writers.stop()
        self._give_up("closed")

    def _write(self, number: int, block: NewBlock | None, array: np.ndarray, slots: Iterable[int] | np.ndarray) -> Job:
        rows = _checked(array, slots)
        if not rows.size or not array.shape[1]:
            raise ValueError("a block without rows")
        job = Job("write", number, len(rows) * array.shape[1])
        task = Write(job, block, array, rows, time.monotonic() + self._limits.ranks_seconds)
        backlog = self._ledger.backlog
        self._ledger.begin(job, task)
        state = self.state
        if self._is_closed or state is not StoreState.OK:
            self._ledger.end(job, "closed" if self._is_closed else state.value)
        elif backlog and backlog + job.nbytes > self._limits.backlog_bytes:
            self._ledger.end(job, "backlog")
        else:
            self._inbox.write(task)
        return job

    def _delete(self, what: list[int] | str) -> Job:
        job = Job("delete")
        self._ledger.begin(job)
        if self._is_closed:
            self._ledger.end(job, "closed")
        else:
            self._inbox.delete(what, job)
        return job

    # Of the I/O threads

    def _has_read(self, task: Task, error: Exception | None) -> None:
        if error is None:
            self._ledger.end(task.job)
        elif isinstance(error, BadSeal) or isinstance(error, OSError) and error.errno in _LOST:
            self._ledger.end(task.job, "damaged")
            self._inbox.delete([task.job.number])
        elif not isinstance(error, GivenUp):
            self._ledger.end(task.job, str(error))

    def _has_written(self, task: Task, error: Exception | None) -> None:
        assert isinstance(task, Write)
        task.error = error
        if isinstance(error, OSError):
            self._health.failed(*write_trouble(error))
        self._inbox.settle(task)

    # Calls that do not return

    def _watch(self) -> None:
        """Whether a thread hangs: then all jobs end, but for those whose rows are just being copied."""
        slow = self._clocks.oldest() > self._limits.slow_seconds
        if slow:
            self._health.say_slow()
            self._give_up(StoreState.SLOW.value)
        elif self._is_slow:
            self._health.worked(wrote=False)
        self._is_slow = slow

    def _give_up(self, why: str) -> None:
        for job, task in self._ledger.open():
            if task is None or task.give_up():
                self._ledger.end(job, why)


def _checked(array: np.ndarray, slots: Iterable[int] | np.ndarray) -> np.ndarray:
    """Slots as int64[n]. Raises ValueError: that is the caller's fault, not the disk's."""
    rows = np.asarray(slots if isinstance(slots, np.ndarray) else list(slots), np.int64)
    if array.dtype != np.uint8 or array.ndim != 2:
        raise ValueError(f"rows are uint8[n, row bytes], not {array.dtype}[{array.ndim} axes]")
    if rows.size and not 0 <= rows.min() <= rows.max() < len(array):
        raise ValueError(f"slots of {len(array)}")
    return rows


def _try(folder: Path) -> None:
    """Raises ValueError if the folder cannot be written. In a thread: it may hang, and then the start goes on."""
    found: list[OSError] = []

    def attempt() -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = folder / f"{secrets.token_hex(8)}.probe"
            probe.touch(0o600)
            probe.unlink()
        except OSError as e:
            found.append(e)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(_TRY_SECONDS)
    if found and found[0].errno != errno.ENOSPC:
        raise ValueError(f"kv_disk_path: {folder}: {found[0].strerror}") from found[0]
