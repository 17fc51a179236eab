"""The threads that read and write segments, and what they do.

All bytes go through a buffer of the thread: it is aligned for direct I/O, and since rows are only touched while they
are copied, a job can be given up, and its rows used for something else, while its thread hangs in a call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from radixrt.worker.disk.block import Job, NewBlock
from radixrt.worker.disk.files import Buffer, Files, aligned
from radixrt.worker.disk.health import Clocks
from radixrt.worker.disk.seals import BadSeal, Seals


class Place(NamedTuple):
    """Where a part is, and what its bytes must be. `path`: the digest of its block's path."""

    segment: int
    offset: int
    nbytes: int
    seal: bytes
    path: bytes


class GivenUp(Exception):
    """Nobody waits for the task any more."""


class Task:
    """A read or a write. `lock` is held while its rows are touched, never while a call of the system may hang."""

    def __init__(self, job: Job, array: np.ndarray, slots: np.ndarray) -> None:
        self.job = job
        self._array = array
        self._slots = slots
        self._lock = threading.Lock()
        self.given_up = False
        self.file = Path()
        """Of its segment."""
        self.salt = b""
        """What the segment's key is derived from."""

    def give_up(self) -> bool:
        """Its rows will not be touched any more. False if they are, just now."""
        if not self._lock.acquire(blocking=False):
            return False
        self.given_up = True
        self._lock.release()
        return True


class Write(Task):
    """`block`: None for a part of a rank that is not the first. The place is set before it is run."""

    def __init__(self, job: Job, block: NewBlock | None, array: np.ndarray, slots: np.ndarray, deadline: float) -> None:
        super().__init__(job, array, slots)
        self.block = block
        self.deadline = deadline
        self.place = Place(0, 0, job.nbytes, b"", b"")
        self.error: Exception | None = None

    def is_of(self, prefix: str) -> bool:
        """Whether its namespace begins with it."""
        return self.block is not None and self.block.namespace.startswith(prefix)

    def run(self, files: Files, seals: Seals, memory: tuple[Buffer, Buffer]) -> None:
        """Write the rows and set the seal."""
        number, place = self.job.number, self.place
        size = place.nbytes + seals.overhead
        data = memory[0].view(aligned(size))
        plain = memory[1].view(place.nbytes) if seals.encrypted else data[: place.nbytes]
        with self._lock:
            if self.given_up:
                raise GivenUp
            gather(self._array, self._slots, plain)
        if seals.encrypted:
            seal = seals.encrypt(number, place.path, self.salt, place.offset, plain, data)
        else:
            seal = seals.seal(number, place.path, plain)
        data[size:] = bytes(len(data) - size)
        files.write(self.file, place.offset, data)
        self.place = place._replace(seal=seal)


class Read(Task):
    """Rows [first, first + len(slots)) of a block. The place is set before it is run."""

    def __init__(self, job: Job, array: np.ndarray, slots: np.ndarray, first: int) -> None:
        super().__init__(job, array, slots)
        self._first = first
        self.place = Place(0, 0, 0, b"", b"")

    def fits(self) -> bool:
        """Whether the block, at its place, has rows of that size, and as many."""
        width = self._array.shape[1]
        return self.place.nbytes % width == 0 and (self._first + len(self._slots)) * width <= self.place.nbytes

    def run(self, files: Files, seals: Seals, memory: tuple[Buffer, Buffer]) -> None:
        """Raises BadSeal."""
        number, place = self.job.number, self.place
        size = place.nbytes + seals.overhead
        data = memory[0].view(aligned(size))
        if self.given_up:
            raise GivenUp
        if files.read(self.file, place.offset, data) < size:
            raise BadSeal
        plain = data[: place.nbytes]
        if seals.encrypted:
            plain = memory[1].view(place.nbytes)
            seals.decrypt(number, place.path, self.salt, place.offset, data[:size], place.seal, plain)
        else:
            seals.verify(number, place.path, plain, place.seal)
        width = self._array.shape[1]
        wanted = plain[self._first * width : (self._first + len(self._slots)) * width]
        with self._lock:
            if self.given_up:
                raise GivenUp
            scatter(wanted, self._array, self._slots)


def gather(array: np.ndarray, slots: np.ndarray, out: memoryview) -> None:
    """Copy `array[slots]`, uint8[n, width], into `out`, n * width bytes."""
    rows = np.frombuffer(out, np.uint8).reshape(len(slots), array.shape[1])
    if _is_run(slots):
        np.copyto(rows, array[slots[0] : slots[-1] + 1])
    else:
        np.take(array, slots, axis=0, out=rows, mode="clip")  # "raise" would copy once more


def scatter(data: memoryview, array: np.ndarray, slots: np.ndarray) -> None:
    """The inverse."""
    rows = np.frombuffer(data, np.uint8).reshape(len(slots), array.shape[1])
    if _is_run(slots):
        np.copyto(array[slots[0] : slots[-1] + 1], rows)
    else:
        array[slots] = rows


def _is_run(slots: np.ndarray) -> bool:
    return len(slots) > 0 and int(slots[-1] - slots[0]) == len(slots) - 1 and bool((np.diff(slots) == 1).all())


class Rate:
    """Bytes a second while something was under way, of late."""

    _LATELY_BYTES = 1 << 30

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active = 0
        self._mark = 0.0
        self._seconds = 0.0
        self._bytes = 0.0

    def begin(self) -> None:
        with self._lock:
            self._count(0)
            self._active += 1

    def end(self, nbytes: int) -> None:
        with self._lock:
            self._count(nbytes)
            self._active -= 1

    def _count(self, nbytes: int) -> None:
        now = time.monotonic()
        if self._active:
            self._seconds += now - self._mark
        self._mark = now
        self._bytes += nbytes
        if self._bytes > self._LATELY_BYTES:
            self._bytes, self._seconds = self._bytes / 2, self._seconds / 2

    @property
    def value(self) -> float:
        """0: not known yet."""
        with self._lock:
            return self._bytes / self._seconds if self._seconds > 0 else 0.0


class IoThreads:
    """Threads that run tasks and hand them, with the exception that ended them, to `done`, which must not raise. They
    are daemons, so that one that hangs does not hold up the end of the process."""

    def __init__(
        self,
        name: str,
        count: int,
        files: Files,
        seals: Seals,
        clocks: Clocks,
        done: Callable[[Task, Exception | None], None],
    ) -> None:
        self._tasks: SimpleQueue[Read | Write | None] = SimpleQueue()
        self._files = files
        self._seals = seals
        self._clocks = clocks
        self._done = done
        self.rate = Rate()
        self._threads = [threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def put(self, task: Read | Write) -> None:
        self._tasks.put(task)

    def stop(self) -> None:
        """After the tasks that wait."""
        for _ in self._threads:
            self._tasks.put(None)

    def _run(self) -> None:
        memory = Buffer(), Buffer()
        while (task := self._tasks.get()) is not None:
            self.rate.begin()
            self._clocks.begin()
            error: Exception | None = None
            try:
                task.run(self._files, self._seals, memory)
            except Exception as e:
                error = e
            self._clocks.end()
            self.rate.end(0 if error else task.place.nbytes)
            self._done(task, error)
            del task, error  # neither rows nor frames are kept while it waits
