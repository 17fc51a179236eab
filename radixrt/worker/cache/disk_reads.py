"""What the disk tier reads: blocks that follow what memory has of a request's path, from when it arrives (see
`disk_tier`).

    path      [ device | host | ..... | host | ......... | not on disk ]
    read                      [ 7 ][8 |      | 8 ][ 9 ]                       into slots that host memory lends

A block is read and verified whole, and the pages that are needed of it are kept. When all have ended, host memory
adopts those that follow each other without a gap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from radixrt.messages import TOKEN_BYTES
from radixrt.tree import Lease, RadixTree
from radixrt.worker.cache import disk_policy as policy
from radixrt.worker.cache.disk_figures import Disk, DiskFigures
from radixrt.worker.cache.disk_index import DiskIndex, Entry, runs
from radixrt.worker.cache.disk_states import DiskState, DiskStates
from radixrt.worker.cache.host_recurrent_states import HostRecurrentStatePool
from radixrt.worker.cache.host_tier import HostTier
from radixrt.worker.disk.block import Job
from radixrt.worker.prefill_cost import PrefillCost


@dataclass(slots=True, eq=False)
class _Part:
    """A block of which rows, from `first` on, are read to the slots of some pages of a path."""

    entry: Entry
    number: int
    first: int
    pages: np.ndarray
    ok: bool | None = None


@dataclass(slots=True, eq=False)
class Fetch:
    """What is read for one path, `ids`, int32. `slots`: by page, lent ones, or 0 where nothing is read."""

    id: int
    namespace: str
    ids: bytes
    tokens: int
    """That need not be computed once all is read."""
    slots: np.ndarray
    parts: list[_Part]
    lease: Lease
    settled: Callable[[], bool]
    """Whether nothing is copied to or from these slots any more."""
    compute_seconds: float
    began: float = field(default_factory=time.monotonic)
    state: DiskState | None = None
    state_number: int = 0
    state_slot: int = 0
    state_ok: bool | None = None
    issued: bool = False
    over: bool = False
    """Nobody waits for it any more."""


class DiskReader:
    """Reads from `disk` to slots of `host`."""

    def __init__(
        self, host: HostTier, disk: Disk, index: DiskIndex, states: DiskStates, figures: DiskFigures, page_size: int
    ) -> None:
        self._host = host
        self._disk = disk
        self._index = index
        self._states = states
        self._figures = figures
        self._page_size = page_size
        self._fetches: dict[int, Fetch] = {}
        self._jobs: dict[int, tuple[Fetch, _Part | None, Job]] = {}
        """By id of the job; without a part it is that of a state."""
        self._fetch_of: dict[int, Fetch] = {}
        """By number, of the blocks that are being read."""
        self._next = 0
        self.ready: list[int] = []
        """Fetches that have ended, each once; emptied by who waits for them."""

    def attach(self, device: RadixTree) -> None:
        self._device = device

    @property
    def is_busy(self) -> bool:
        return bool(self._fetches)

    # ------------------------------------------------------------ begun

    def begin(self, namespace: str, ids: bytes, most: int, hit: int, cost: PrefillCost) -> int:
        """Begin to read what memory lacks of a path of which a request can use `most` tokens and has `hit`. Returns a
        number to wait for, of another path's reads if they bring the same blocks; 0: nothing is read."""
        if not len(self._index) or not self._disk.serves:
            return 0
        size = self._page_size
        handles = self._index.handles(namespace, ids)[: -(-most // size)]
        handles = handles[: self._index.readable(handles)]
        if len(handles) * size <= hit:
            return 0
        start = self._device.match(namespace, ids).length // size
        here = np.frombuffer(self._host.tree.match(namespace, ids).values(), np.int32)[: -(-most // size)]
        have = np.zeros(max(len(handles), len(here), start), dtype=bool)
        have[: len(here)] = here > 0
        have[:start] = True
        on_disk = np.arange(len(have)) < len(handles)
        gaps = np.flatnonzero(~(have | on_disk))
        stop = int(gaps[0]) if len(gaps) else len(have)
        state = None
        if self._disk.state_bytes:
            stop, state = self._deepest(namespace, ids, min(most, stop * size), hit)
        tokens = min(most, stop * size)
        lacking = np.flatnonzero(~have[:stop])
        if tokens <= hit or not (len(lacking) or state):
            return 0
        parts = self._parts(handles, lacking)
        for part in parts:
            if (other := self._fetch_of.get(part.number)) is not None:
                return other.id
        nbytes = sum(part.entry.nbytes for part in parts) + (state.nbytes if state else 0)
        if not policy.reading_pays(tokens - hit, hit, nbytes, cost, self._disk.rates()[0]):
            self._figures.declined += 1
            return 0
        return self._lend(namespace, ids, tokens, hit, stop, handles, lacking, state, cost)

    def _deepest(self, namespace: str, ids: bytes, most: int, hit: int) -> tuple[int, DiskState | None]:
        """(pages, checkpoint) up to the deepest checkpoint of a path that memory (None) or the disk has."""
        in_memory = max(hit, self._host.deepest_state(namespace, ids, most)[0])
        state = self._states.deepest(namespace, ids, most)
        if state is not None and state.prefix[0] > in_memory:
            tokens = state.prefix[0]
            if self._index.path(state.handle)[: tokens * TOKEN_BYTES] == ids[: tokens * TOKEN_BYTES]:
                return tokens // self._page_size, state
        return in_memory // self._page_size, None

    def _parts(self, handles: np.ndarray, lacking: np.ndarray) -> list[_Part]:
        """The parts of blocks that bring the pages that are `lacking`; those of a part follow each other."""
        found = []
        for first, stop, handle in runs(handles):
            entry = self._index.of(handle)
            begin, end = np.searchsorted(lacking, (first, stop))
            pages = lacking[begin:end]
            for run in np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1):
                if len(run):
                    row = int(run[0]) - entry.start // self._page_size
                    found.append(_Part(entry, entry.number, row, run))
        return found

    def _lend(
        self, namespace: str, ids: bytes, tokens: int, hit: int, stop: int, handles: np.ndarray, lacking: np.ndarray,
        state: DiskState | None, cost: PrefillCost,
    ) -> int:  # fmt: skip
        size, state_slot = self._page_size, 0
        if state is not None:
            assert isinstance(self._host.states, HostRecurrentStatePool)
            state_slot = self._host.states.lend()
            if not state_slot:
                return 0
        tree = self._host.tree
        lease = tree.lease(tree.match(namespace, ids, stop * size))  # what is here already is to stay
        lent = self._host.lend(len(lacking))
        if len(lent) < len(lacking):
            stop = int(lacking[len(lent)])
            lacking, tokens = lacking[: len(lent)], min(tokens, stop * size)
            if tokens <= hit or self._disk.state_bytes:  # a state is of no use without all pages before it
                self._host.take_back(lent)
                if state_slot:
                    self._host.states.take_back(state_slot)
                lease.release()
                return 0
        slots = np.zeros(stop, dtype=np.int32)
        slots[lacking] = lent
        self._next += 1
        fetch = self._fetches[self._next] = Fetch(
            self._next, namespace, ids[: stop * size * TOKEN_BYTES], tokens - hit, slots,
            self._parts(handles, lacking), lease, self._disk.settled(),
            cost.seconds(tokens - hit, hit), state=state,
            state_number=state.number if state else 0, state_slot=state_slot,
        )  # fmt: skip
        for part in fetch.parts:
            self._fetch_of[part.number] = fetch
        self.issue()
        return fetch.id

    def issue(self) -> None:
        """Read what nothing is copied to any more."""
        for fetch in self._fetches.values():
            if fetch.issued or not fetch.settled():
                continue
            fetch.issued = True
            for part in fetch.parts:
                job = self._disk.read(part.number, "kv", fetch.slots[part.pages], part.first)
                self._jobs[id(job)] = fetch, part, job
            if fetch.state is not None:
                job = self._disk.read(fetch.state_number, "state", np.array([fetch.state_slot], dtype=np.int32))
                self._jobs[id(job)] = fetch, None, job

    # ------------------------------------------------------------ ended

    def ended(self, job: Job) -> bool:
        """A job has ended. Whether it was one of these."""
        if (found := self._jobs.pop(id(job), None)) is None:
            return False
        fetch, part, _ = found
        self._figures.failed += not job.ok
        self._figures.read_bytes += job.nbytes if job.ok else 0
        if part is not None:
            part.ok = bool(job.ok) and self._index.contains(part.entry)
        else:
            assert fetch.state is not None
            fetch.state_ok = bool(job.ok) and self._states.contains(fetch.state)
        if all(part.ok is not None for part in fetch.parts) and (fetch.state is None or fetch.state_ok is not None):
            self._finish(fetch)
        return True

    def _finish(self, fetch: Fetch) -> None:
        seconds = time.monotonic() - fetch.began
        for part in fetch.parts:
            self._fetch_of.pop(part.number, None)
        whole = all(part.ok for part in fetch.parts)
        self._adopt(fetch)
        left = fetch.slots[fetch.slots > 0]
        self._host.take_back(left)
        if fetch.state is not None:
            states = self._host.states
            assert isinstance(states, HostRecurrentStatePool)
            if fetch.state_ok and whole:
                ids = fetch.ids[: fetch.state.prefix[0] * TOKEN_BYTES]
                states.adopt(fetch.namespace, ids, fetch.state.prefix, fetch.state_slot)
            else:
                states.take_back(fetch.state_slot)
        fetch.lease.release()
        del self._fetches[fetch.id]
        used = [part.number for part in fetch.parts if part.ok]
        self._disk.touch([*used, fetch.state_number] if fetch.state_ok else used)
        if not fetch.over:
            self.ready.append(fetch.id)
            self._figures.hits += whole
            self._figures.read_seconds += seconds
            if whole:
                self._figures.saved_seconds += max(0.0, fetch.compute_seconds - seconds)

    def _adopt(self, fetch: Fetch) -> None:
        """Let host memory have the pages that are read, up to the first one that is not."""
        stop = min((int(part.pages[0]) for part in fetch.parts if not part.ok), default=len(fetch.slots))
        slots = fetch.slots[:stop].copy()
        there = np.flatnonzero(slots)
        if not len(there):
            return
        slots = slots[: there[-1] + 1]
        self._figures.read_tokens += len(there) * self._page_size
        self._host.adopt(fetch.namespace, fetch.ids[: len(slots) * self._page_size * TOKEN_BYTES], slots)
        fetch.slots[: len(slots)] = 0

    def stop_waiting(self, id: int) -> None:
        """Nobody waits for a fetch any more: what was read so far can be used, and the rest when it comes."""
        if (fetch := self._fetches.get(id)) is not None:
            if not fetch.over:
                self._figures.late += 1
            fetch.over = True
            self._adopt(fetch)

    def lent(self) -> Iterable[np.ndarray]:
        """The lent slots of pages that are held."""
        return [fetch.slots[fetch.slots > 0] for fetch in self._fetches.values()]
