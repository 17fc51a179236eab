"""What the disk tier writes: the paths that requests leave, behind them (see `disk_tier`).

    noted --copies planned--> begun --step planned--> in a step --its result is applied--> landing --written--> done

Only what a step that ended well has copied is written. Of what several requests leave, the same pages are written once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from radixrt.messages import TOKEN_BYTES, tenant_of
from radixrt.messages.digests import prefix_digest
from radixrt.tree import Lease, RadixTree
from radixrt.worker.cache import disk_policy as policy
from radixrt.worker.cache.disk_figures import Disk, DiskFigures
from radixrt.worker.cache.disk_index import DiskIndex, Entry, runs
from radixrt.worker.cache.disk_states import DiskState, DiskStates
from radixrt.worker.cache.host_recurrent_states import HostRecurrentStatePool
from radixrt.worker.cache.host_tier import HostTier
from radixrt.worker.cache.pins import ends_along
from radixrt.worker.cache.recurrent_states import AnyStates
from radixrt.worker.disk.block import Job, NewBlock

MAX_NOTED_BYTES = 64 << 20
"""Of the paths that wait to be written."""


@dataclass(slots=True)
class _Noted:
    """A path to be written: `ids` are int32, whole pages. `touched`: whether its blocks are known to be in use."""

    namespace: str
    ids: bytes
    touched: bool = False
    begun: int = 0
    """Pages of it that are on disk or were begun with."""


@dataclass(slots=True, eq=False)
class _Write:
    """A block that is written from `slots`; of these, `lent` are lent, and the others leased."""

    of: Entry | DiskState
    namespace: str
    slots: np.ndarray
    lent: np.ndarray
    lease: Lease | None = None


class DiskWriter:
    """Writes to `disk` what is in the trees of `device` and `host`. `block_pages`: the most pages of a block."""

    def __init__(
        self, host: HostTier, disk: Disk, index: DiskIndex, states: DiskStates, figures: DiskFigures, page_size: int,
        block_pages: int,
    ) -> None:  # fmt: skip
        self._host = host
        self._disk = disk
        self._index = index
        self._states = states
        self._figures = figures
        self._page_size = page_size
        self._page_ids = page_size * TOKEN_BYTES
        self._block_pages = block_pages
        self._noted: deque[_Noted] = deque()
        self._noted_bytes = 0
        self._begun: list[_Write] = []
        self._steps: deque[list[_Write]] = deque()
        """What was begun when each step was planned whose result is not applied yet."""
        self._landing: deque[tuple[Callable[[], bool], list[_Write]]] = deque()
        """With what tells whether their copies have ended."""
        self._jobs: dict[int, tuple[_Write, Job]] = {}
        """By id of the job."""
        self._pages = 0
        """Whose slots are held."""

    def attach(self, device: RadixTree, states: AnyStates) -> None:
        self._device = device
        self._device_states = states

    @property
    def is_busy(self) -> bool:
        return bool(self._noted or self._begun or any(self._steps) or self._landing or self._jobs)

    @property
    def has_begun(self) -> bool:
        """Whether there are blocks whose copies are to be made."""
        return bool(self._begun)

    # ------------------------------------------------------------ noted

    def note(self, namespace: str, ids: bytes) -> None:
        """A path of whole pages, int32, is in memory: it is to be on disk soon."""
        if not ids or not self._disk.serves or not self._disk.keeps(namespace):
            return
        self._noted.append(_Noted(namespace, ids))
        self._noted_bytes += len(ids)
        while self._noted_bytes > MAX_NOTED_BYTES and len(self._noted) > 1:
            self._drop(self._noted[0])

    def _drop(self, noted: _Noted) -> None:
        self._noted.remove(noted)
        self._noted_bytes -= len(noted.ids)
        known = len(self._index.handles(noted.namespace, noted.ids)) * self._page_size
        self._figures.lost_tokens += len(noted.ids) // TOKEN_BYTES - known

    def forget(self, namespace: str, path: bytes, keep: int) -> None:
        """Do not write a path beyond its first `keep` tokens: it is not valid."""
        for noted in list(self._noted):
            if noted.namespace == namespace and ends_along(noted.ids, path, keep):
                self._noted.remove(noted)
                self._noted_bytes -= len(noted.ids)

    def forget_tenant(self, tenant: str) -> None:
        """Do not write what waits to be written of a tenant."""
        for noted in [noted for noted in self._noted if tenant_of(noted.namespace) == tenant]:
            self._noted.remove(noted)
            self._noted_bytes -= len(noted.ids)

    def forget_all(self) -> None:
        """Do not write what waits to be written."""
        self._noted.clear()
        self._noted_bytes = 0

    # ------------------------------------------------------------ begun

    def begin(self) -> None:
        """Begin with as many blocks as there is room for, of the paths that were noted first."""
        while self._noted and self._disk.serves and self._disk.backlog <= policy.BACKLOG_BYTES:
            done = self._begin_block(self._noted[0])
            if done is None:
                return
            if done:
                self._noted_bytes -= len(self._noted.popleft().ids)

    def _begin_block(self, noted: _Noted) -> bool | None:
        """Begin with the next block of a path. Whether there is no more of it; None: it has to wait."""
        handles = self._index.handles(noted.namespace, noted.ids)
        device, start = self._device.match(noted.namespace, noted.ids), len(handles)
        if start * self._page_ids >= len(noted.ids):
            return self._begin_states(noted, handles, np.frombuffer(device.values(), np.int32))
        if start < noted.begun:  # the disk has no room, or does not take it: once is enough
            return self._lose(noted, start)
        room = policy.writable_pages(self._host.total, self._pages)
        stop = min(start + min(self._block_pages, room), len(noted.ids) // self._page_ids)
        if stop == start:
            return None
        ids = noted.ids[: stop * self._page_ids]
        lease = self._host.tree.lease(self._host.tree.match(noted.namespace, ids))
        slots = _part(lease.values(), start, stop)
        pages = _part(device.values(), start, stop)
        gone = np.flatnonzero((slots == 0) & (pages == 0))
        if len(gone):
            slots = slots[: gone[0]]
        if not len(slots):
            lease.release()
            return self._lose(noted, start)
        copied = np.flatnonzero(slots == 0)
        lent = self._host.lend(len(copied))
        if len(lent) < len(copied):
            slots, copied = slots[: copied[len(lent)]], copied[: len(lent)]
        slots[copied] = lent
        leased: Lease | None = lease
        if len(copied) == len(slots):
            lease.release()
            leased = None
        if not len(slots):  # nothing can be lent: in vain if what is here of the path itself leaves no room
            return None if self._pages else self._lose(noted, start)
        if len(copied):
            self._host.copy_out(pages[copied], lent)
        path = noted.ids[: (start + len(slots)) * self._page_ids]
        nbytes = len(slots) * self._disk.page_bytes
        parent = int(handles[-1]) if start else 0
        entry = self._index.begin(noted.namespace, path, parent, start * self._page_size, nbytes)
        self._pages += len(slots)
        noted.begun = start + len(slots)
        self._begun.append(_Write(entry, noted.namespace, slots, lent, leased))
        return False

    def _lose(self, noted: _Noted, start: int) -> bool:
        """The pages of a path after its first `start` are not written."""
        self._figures.lost_tokens += len(noted.ids) // TOKEN_BYTES - start * self._page_size
        return True

    def _begin_states(self, noted: _Noted, handles: np.ndarray, pages: np.ndarray) -> bool | None:
        """Begin with the checkpoints of a path whose pages are written or begun with. Whether there are no more."""
        if not noted.touched:
            noted.touched = True
            entries = [self._index.of(handle) for _, _, handle in runs(handles)]
            self._disk.touch([entry.number for entry in entries if entry.ready])
        host = self._host.states
        if not isinstance(host, HostRecurrentStatePool):
            return True
        for count, source in self._device_states.along(pages):
            tokens = count * self._page_size
            prefix = tokens, prefix_digest(noted.namespace, noted.ids[: tokens * TOKEN_BYTES])
            if self._states.has(prefix):
                continue
            slot = host.lend() if policy.writable_pages(host.total, host.lent) else 0
            if not slot:
                return None if host.lent else True
            state = DiskState(0, int(handles[count - 1]), prefix, self._disk.state_bytes, ready=False)
            if not self._states.add(state):
                host.take_back(slot)
                return True
            host.copy_out(source, slot)
            lent = np.array([slot], dtype=np.int32)
            self._begun.append(_Write(state, noted.namespace, lent, lent))
        return True

    # ------------------------------------------------------------ in steps

    def planned(self) -> None:
        """The copies of what was begun are those of a step now."""
        self._steps.append(self._begun)
        self._begun = []

    def applied(self) -> None:
        """The first of these steps has ended well."""
        if self._steps and (writes := self._steps.popleft()):
            self._landing.append((self._disk.settled(), writes))

    def reset(self) -> None:
        """A step has failed, and with it those after it: nothing of what they were to copy is written."""
        for write in [write for writes in (*self._steps, self._begun) for write in writes]:
            self._give_back(write)
            if self._has(write.of):
                self._give_up(write.of)
        self._steps.clear()
        self._begun = []

    # ------------------------------------------------------------ written

    def issue(self) -> None:
        """Write what has landed."""
        while self._landing and self._landing[0][0]():
            for write in self._landing.popleft()[1]:
                if self._has(write.of):
                    job = self._issue(write)
                    self._jobs[id(job)] = write, job
                else:
                    self._give_back(write)

    def _issue(self, write: _Write) -> Job:
        of, now = write.of, time.time()
        if isinstance(of, Entry):
            parent = self._index.of(of.parent).number if of.parent else None
            job = self._disk.write(NewBlock("kv", of.namespace, parent, of.start, of.ids, now), write.slots)
            self._index.numbered(of, job.number)
        else:
            parent = self._index.of(of.handle).number
            job = self._disk.write(NewBlock("state", write.namespace, parent, of.prefix[0], b"", now), write.slots)
            of.number = job.number
        return job

    def ended(self, job: Job) -> bool:
        """A job has ended. Whether it was one of these."""
        if (found := self._jobs.pop(id(job), None)) is None:
            return False
        write, of = found[0], found[0].of
        self._give_back(write)
        if not self._has(of):  # it was forgotten meanwhile
            if job.ok:
                self._disk.delete([job.number])
        elif not job.ok:
            self._give_up(of)
        else:
            self._figures.written_bytes += job.nbytes
            if isinstance(of, Entry):
                self._index.written(of, job.nbytes)
                self._figures.written_tokens += of.stop - of.start
            else:
                self._states.written(of)
        return True

    def _has(self, of: Entry | DiskState) -> bool:
        return self._index.contains(of) if isinstance(of, Entry) else self._states.contains(of)

    def _give_back(self, write: _Write) -> None:
        if isinstance(write.of, DiskState):
            self._host.states.take_back(int(write.lent[0]))
            return
        self._host.take_back(write.lent)
        self._pages -= len(write.slots)
        if write.lease is not None:
            write.lease.release()

    def _give_up(self, of: Entry | DiskState) -> None:
        """A block is not written after all, nor are those after it."""
        if isinstance(of, DiskState):
            self._states.remove(of)
            return
        gone = self._index.remove([of.handle])
        self._states.remove_below(entry.handle for entry in gone)
        self._figures.lost_tokens += sum(entry.stop - entry.start for entry in gone)

    def lent(self) -> Iterable[np.ndarray]:
        """The lent slots of pages that are held."""
        writes = [*self._begun, *(write for writes in self._steps for write in writes)]
        writes += [write for _, landing in self._landing for write in landing]
        writes += [write for write, _ in self._jobs.values()]
        return [write.lent for write in writes if isinstance(write.of, Entry)]


def _part(values: bytes, start: int, stop: int) -> np.ndarray:
    """int32[stop - start]: these of a path's values, 0 where there are none."""
    found = np.zeros(stop - start, dtype=np.int32)
    have = np.frombuffer(values, np.int32)[start:stop]
    found[: len(have)] = have
    return found
