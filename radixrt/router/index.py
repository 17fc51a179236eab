"""What every worker has cached, mirrored from its events, and what is being computed where.

A worker describes its tree as runs. A run is a stretch of tokens that hangs below a prefix of another run:

    run 1  [ a b c d e f ]            parent 0 (the root)
    run 2        [ x y ]              parent 1, parent_at 3: its path is a b c x y

The mirror keeps runs by number and their paths in one tree that all workers share. It never guesses: an event
that does not fit what it holds asks for a snapshot, and until that arrives the worker counts as empty.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from radixrt.messages import CacheEvent, Cleared, Removed, StepDone, Stored
from radixrt.tree import OwnerTree

TOKEN_BYTES = 4


class OutOfStep(Exception):
    """An event refers to something that the mirror does not hold."""


@dataclass(slots=True)
class _Run:
    namespace: str
    parent: int
    parent_at: int
    ids: bytearray


@dataclass(slots=True)
class _Mirror:
    """One worker's runs. `next_seq` is None while a snapshot is awaited."""

    next_seq: int | None = 0
    runs: dict[int, _Run] = field(default_factory=dict)

    def path(self, run: _Run, tokens: int) -> bytes:
        """Ids from the root to the first `tokens` of `run`."""
        pieces = [memoryview(run.ids)[: tokens * TOKEN_BYTES]]
        while run.parent_at:
            at = run.parent_at
            parent = self.runs.get(run.parent)
            if parent is None or len(parent.ids) < at * TOKEN_BYTES:
                raise OutOfStep(f"run {run.parent} does not reach {at}")
            run = parent
            pieces.append(memoryview(run.ids)[: at * TOKEN_BYTES])
        return b"".join(reversed(pieces))


class Index:
    """Who holds which prefix. Workers are numbers >= 0 that are never used again for another life."""

    def __init__(self) -> None:
        self._cached = OwnerTree()
        self._computing = OwnerTree()
        self._mirrors: dict[int, _Mirror] = {}

    @property
    def tokens(self) -> int:
        """Distinct cached tokens over all workers."""
        return self._cached.tokens

    def add_worker(self, worker: int, *, fresh: bool) -> None:
        """A worker whose events begin at 0 (`fresh`), or one whose snapshot must come first."""
        self._mirrors[worker] = _Mirror(0 if fresh else None)

    def drop_worker(self, worker: int) -> None:
        self._mirrors.pop(worker, None)
        self._cached.remove_owner(worker)
        self._computing.remove_owner(worker)

    def awaits_snapshot(self, worker: int) -> bool:
        """Until it comes, the worker counts as empty."""
        return self._mirrors[worker].next_seq is None

    def apply(self, worker: int, step: StepDone) -> bool:
        """Mirror one message's events. False when something is missing: ask that worker for a Snapshot."""
        mirror = self._mirrors[worker]
        if step.snapshot:
            self._empty(worker, mirror)
            mirror.next_seq = step.seq
        elif mirror.next_seq is None:
            return True
        elif step.seq != mirror.next_seq:
            self._empty(worker, mirror)
            return False
        else:
            mirror.next_seq += len(step.events)
        try:
            for event in step.events:
                self._apply_event(worker, mirror, event)
        except OutOfStep:
            self._empty(worker, mirror)
            return False
        return True

    def _empty(self, worker: int, mirror: _Mirror) -> None:
        mirror.runs.clear()
        mirror.next_seq = None
        self._cached.remove_owner(worker)

    def _apply_event(self, worker: int, mirror: _Mirror, event: CacheEvent) -> None:
        match event:
            case Stored():
                self._store(worker, mirror, event)
            case Removed():
                self._remove(worker, mirror, event)
            case Cleared():
                mirror.runs.clear()
                self._cached.remove_owner(worker)

    def _store(self, worker: int, mirror: _Mirror, event: Stored) -> None:
        run = mirror.runs.get(event.run)
        if event.at == 0:
            if run is not None and run.ids:
                raise OutOfStep(f"run {event.run} exists")
            run = mirror.runs[event.run] = _Run(event.namespace, event.parent, event.parent_at, bytearray())
        elif run is None or len(run.ids) != event.at * TOKEN_BYTES:
            raise OutOfStep(f"run {event.run} does not end at {event.at}")
        run.ids += event.ids
        end = len(run.ids) // TOKEN_BYTES
        path = mirror.path(run, end)
        self._cached.add(run.namespace, path, worker, (len(path) - len(event.ids)) // TOKEN_BYTES)

    def _remove(self, worker: int, mirror: _Mirror, event: Removed) -> None:
        run = mirror.runs.get(event.run)
        if run is None or len(run.ids) < event.keep * TOKEN_BYTES:
            raise OutOfStep(f"run {event.run} does not hold {event.keep}")
        path = mirror.path(run, len(run.ids) // TOKEN_BYTES)
        gone = len(run.ids) - event.keep * TOKEN_BYTES
        self._cached.remove(run.namespace, path, worker, (len(path) - gone) // TOKEN_BYTES)
        if event.keep:
            del run.ids[event.keep * TOKEN_BYTES :]
        else:
            del mirror.runs[event.run]

    def computing(self, worker: int, namespace: str, ids: bytes) -> None:
        """A prompt was sent to `worker`: until `computed`, others are placed as if it were cached there."""
        self._computing.add(namespace, ids, worker)

    def computed(self, worker: int, namespace: str, ids: bytes) -> None:
        self._computing.remove(namespace, ids, worker)

    def match(self, namespace: str, ids: bytes) -> dict[int, int]:
        """Worker -> leading tokens of `ids` that it holds or is computing; workers with none are absent."""
        hits = dict(self._cached.match(namespace, ids))
        for worker, length in self._computing.match(namespace, ids):
            if length > hits.get(worker, 0):
                hits[worker] = length
        return hits
