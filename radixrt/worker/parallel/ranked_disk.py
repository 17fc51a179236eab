"""The disk of a tensor-parallel group: each rank writes and reads its own part of every block; rank 0 has the index.

rank 0   write: its part, and the number --pipe--> rank 1 writes its part      the store commits when all have
         read:  its part, and the number --pipe--> rank 1 reads its part
                done when all have       <--pipe-- PartRead
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec
import numpy as np

from radixrt.messages.ranks import PartRead, ReadPart, ToRank, WritePart
from radixrt.worker.cache.host_disk import HostDisk
from radixrt.worker.disk import Changes, Job, NewBlock

POLL_SECONDS = 0.001
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(PartRead).decode


class RankedDisk(HostDisk):
    """Rank 0's disk, made from its own part, `own`. `send` reaches all other ranks, whose answers come by `answers`."""

    def __init__(self, own: HostDisk, send: Callable[[ToRank], None], answers: list[Connection]) -> None:
        self.__dict__.update(own.__dict__)
        self._send = send
        self._answers = answers
        self._tickets = 0
        self._reading: dict[int, _Read] = {}
        """By ticket: reads that some rank has not ended."""
        self._own_reads: dict[int, tuple[_Read, Job]] = {}
        """By id of rank 0's own job."""

    def write(self, block: NewBlock, slots: np.ndarray) -> Job:
        job = super().write(block, slots)
        if job.ok is None:
            self._send(WritePart(job.number, block.kind, slots.astype(np.int32).tobytes()))
        return job

    def read(self, number: int, kind: str, slots: np.ndarray, first: int = 0) -> Job:
        own = super().read(number, kind, slots, first)
        self._tickets += 1
        read = self._reading[self._tickets] = _Read(Job("read", number), 1 + len(self._answers))
        self._own_reads[id(own)] = read, own
        self._send(ReadPart(self._tickets, number, kind, slots.astype(np.int32).tobytes(), first))
        return read.job

    def poll(self) -> Changes:
        changes = super().poll()
        if not self._reading:
            return changes
        finished = []
        for job in changes.finished:
            if (found := self._own_reads.pop(id(job), None)) is None:
                finished.append(job)
            else:
                found[0].ended(bool(job.ok), job.nbytes)
        for pipe in self._answers:
            while pipe.poll(0):
                answer = _decode(pipe.recv_bytes())
                self._reading[answer.ticket].ended(answer.ok)
        for ticket, read in list(self._reading.items()):
            if not read.left:
                del self._reading[ticket]
                finished.append(read.job)
        return changes._replace(finished=finished)


class _Read:
    """A read of all ranks, of which `left` have not ended."""

    def __init__(self, job: Job, ranks: int) -> None:
        self.job = job
        self.left = ranks
        self._began = time.monotonic()
        self._ok = True

    def ended(self, ok: bool, nbytes: int = 0) -> None:
        self.left -= 1
        self._ok &= ok
        self.job.nbytes += nbytes
        if not self.left:
            self.job.ok, self.job.seconds = self._ok, time.monotonic() - self._began


class FollowerDisk:
    """Another rank's part: a thread does what rank 0 asks for, once the copies that were begun before have ended."""

    def __init__(self, disk: HostDisk, answers: Connection) -> None:
        self._disk = disk
        self._answers = answers
        self._asked: queue.SimpleQueue[tuple[WritePart | ReadPart, Callable[[], bool]]] = queue.SimpleQueue()
        self._tickets: dict[int, tuple[int, Job]] = {}
        """By id of the job."""
        threading.Thread(target=self._serve, name="disk", daemon=True).start()

    def do(self, message: WritePart | ReadPart) -> None:
        self._asked.put((message, self._disk.settled()))

    def _serve(self) -> None:
        while not self._answers.closed:
            self._take_one()
            for job in self._disk.poll().finished:
                if (found := self._tickets.pop(id(job), None)) is not None:
                    with contextlib.suppress(OSError):  # rank 0 has ended, and so does this process
                        self._answers.send_bytes(_encode(PartRead(found[0], bool(job.ok))))

    def _take_one(self) -> None:
        try:
            message, settled = self._asked.get(timeout=POLL_SECONDS if self._tickets else 1.0)
        except queue.Empty:
            return
        while not settled():
            time.sleep(POLL_SECONDS)
        slots = np.frombuffer(message.slots, np.int32)
        if isinstance(message, WritePart):
            self._disk.write_part(message.number, message.kind, slots)
        else:
            job = self._disk.read(message.number, message.kind, slots, message.first)
            self._tickets[id(job)] = message.ticket, job
