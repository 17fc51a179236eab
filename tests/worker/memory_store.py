"""A store of blocks in memory with the face of `radixrt.worker.disk.DiskStore`, whose folder, a `Folder`, outlives it.
Jobs end at random, and everything happens to blocks that happens to files."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np

from radixrt.worker.disk import Block, Changes, Job, NewBlock, StoreState


class Folder:
    """What all stores of one folder share. `most`: bytes, beyond which the least valuable block without children
    goes."""

    def __init__(self, most: int = 1 << 40) -> None:
        self.most = most
        self.blocks: dict[int, Block] = {}
        self.bytes: dict[int, np.ndarray] = {}
        self.damaged: set[int] = set()
        self.next = 1 << 50
        self.stores: list[MemoryStore] = []

    def drop(self, numbers: Iterable[int]) -> None:
        """Remove blocks and all that come after them."""
        gone = set(numbers) & self.blocks.keys()
        while more := {n for n, b in self.blocks.items() if b.parent in gone} - gone:
            gone |= more
        for number in gone:
            del self.blocks[number], self.bytes[number]
        for store in self.stores:
            store.removed += gone

    def shrink(self) -> None:
        while sum(map(len, self.bytes.values())) > self.most:
            parents = {block.parent for block in self.blocks.values()}
            self.drop([min((b.value, n) for n, b in self.blocks.items() if n not in parents)[1]])


class MemoryStore:
    """`rng` decides which jobs end at each `poll`; None: all of them."""

    def __init__(self, folder: Folder, rng: random.Random | None = None) -> None:
        self.folder = folder
        self.state = StoreState.OK
        self.added: list[Block] = []
        self.removed: list[int] = []
        self.reads = 0
        self._rng = rng
        self._jobs: list[tuple[Job, object]] = []
        self._failed: set[int] = set()
        folder.stores.append(self)

    @property
    def backlog(self) -> int:
        return sum(job.nbytes for job, _ in self._jobs if job.kind == "write")

    @property
    def used(self) -> int:
        return sum(map(len, self.folder.bytes.values()))

    def rates(self) -> tuple[float, float]:
        return 0.0, 0.0

    def blocks(self) -> list[Block]:
        return list(self.folder.blocks.values())

    def poll(self) -> Changes:
        jobs, self._jobs = self._jobs, []
        finished = []
        for place, (job, end) in enumerate(jobs):
            if self._rng is not None and self._rng.random() < 0.5:
                self._jobs = jobs[place:]  # in order, as a parent is written before its children
                break
            end()
            finished.append(job)
        self.folder.shrink()
        added, self.added = self.added, []
        removed, self.removed = self.removed, []
        return Changes(finished, [b for b in added if b.number in self.folder.blocks], removed)

    def write(self, block: NewBlock, array: np.ndarray, slots: np.ndarray) -> Job:
        self.folder.next += 1
        job = Job("write", self.folder.next, len(slots) * array.shape[1])
        slots = slots.copy()

        def end() -> None:
            lost = self._rng is not None and self._rng.random() < 0.03
            orphan = block.parent is not None and block.parent not in self.folder.blocks
            job.ok = not (lost or orphan or block.parent in self._failed)
            if not job.ok:
                self._failed.add(job.number)
                return
            found = Block(job.number, *block, nbytes=job.nbytes)
            self.folder.blocks[job.number] = found
            self.folder.bytes[job.number] = array[slots].reshape(-1).copy()
            for store in self.folder.stores:
                if store is not self:
                    store.added.append(found)

        self._jobs.append((job, end))
        return job

    def read(self, number: int, array: np.ndarray, slots: np.ndarray, first: int = 0) -> Job:
        job, slots = Job("read", number), slots.copy()
        self.reads += 1

        def end() -> None:
            found = self.folder.bytes.get(number)
            array[slots] = 0xEE  # whatever comes of it
            job.ok = found is not None and number not in self.folder.damaged
            if not job.ok:
                self.folder.drop([number])
                return
            rows = found.reshape(-1, array.shape[1])
            array[slots] = rows[first : first + len(slots)]
            job.nbytes = len(found)

        self._jobs.append((job, end))
        return job

    def touch(self, numbers: Iterable[int], value: float | None = None) -> None:
        for number in numbers:
            if number in self.folder.blocks:
                self.folder.next += 1
                block = self.folder.blocks[number]
                self.folder.blocks[number] = block._replace(value=self.folder.next if value is None else value)

    def delete(self, numbers: Iterable[int]) -> Job:
        job, gone = Job("delete"), list(numbers)

        def end() -> None:
            self.folder.drop(gone)
            job.ok = True

        self._jobs.append((job, end))
        return job

    def delete_namespaces(self, prefix: str) -> Job:
        return self.delete([n for n, block in self.folder.blocks.items() if block.namespace.startswith(prefix)])

    def close(self) -> None:
        """As if the process was killed: what has not ended never does."""
        self._jobs = []
        if self in self.folder.stores:
            self.folder.stores.remove(self)
