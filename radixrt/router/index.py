"""What every worker has cached, mirrored from its events, and what is being computed where.

A worker describes its tree as runs. A run is a stretch of tokens that hangs below a prefix of another run:

    run 1  [ a b c d e f ]            parent 0 (the root)
    run 2        [ x y ]              parent 1, parent_at 3: its path is a b c x y

One tree mirrors the runs of all workers, in which what they have in common is there once. It never guesses: an event
that does not fit what it holds asks for a snapshot, and until that arrives the worker counts as empty.
"""

from __future__ import annotations

from radixrt.messages import CacheEvent, Cleared, Removed, StepDone, Stored
from radixrt.tree import OwnerTree


class Index:
    """Who holds which prefix. Workers are numbers >= 0 that are never used again for another life."""

    def __init__(self) -> None:
        self._cached = OwnerTree()
        self._computing = OwnerTree()
        self._next_seqs: dict[int, int | None] = {}
        """By worker; None while a snapshot is awaited."""

    @property
    def tokens(self) -> int:
        """Distinct cached tokens over all workers."""
        return self._cached.tokens

    def add_worker(self, worker: int, *, fresh: bool) -> None:
        """A worker whose events begin at 0 (`fresh`), or one whose snapshot must come first."""
        self._next_seqs[worker] = 0 if fresh else None

    def drop_worker(self, worker: int) -> None:
        self._next_seqs.pop(worker, None)
        self._cached.remove_owner(worker)
        self._computing.remove_owner(worker)

    def awaits_snapshot(self, worker: int) -> bool:
        """Until it comes, the worker counts as empty."""
        return self._next_seqs[worker] is None

    def apply(self, worker: int, step: StepDone) -> bool:
        """Mirror one message's events. False when something is missing: ask that worker for a Snapshot."""
        next_seq = self._next_seqs[worker]
        if step.snapshot:
            self._cached.remove_owner(worker)
        elif next_seq is None:
            return True
        elif step.seq != next_seq:
            self._empty(worker)
            return False
        self._next_seqs[worker] = step.seq if step.snapshot else step.seq + len(step.events)
        try:
            for event in step.events:
                self._apply_event(worker, event)
        except (ValueError, OverflowError):  # it refers to what is not held
            self._empty(worker)
            return False
        return True

    def _empty(self, worker: int) -> None:
        self._next_seqs[worker] = None
        self._cached.remove_owner(worker)

    def _apply_event(self, worker: int, event: CacheEvent) -> None:
        match event:
            case Stored():
                self._cached.store(
                    worker, event.namespace, event.run, event.at, event.parent, event.parent_at, event.ids
                )
            case Removed():
                self._cached.cut(worker, event.run, event.keep)
            case Cleared():
                self._cached.remove_owner(worker)

    def computing(self, worker: int, number: int, namespace: str, ids: bytes) -> None:
        """A prompt was sent to `worker`, under a number that no other has there: until it is `computed`, others are
        placed as if it were cached."""
        self._computing.store(worker, namespace, number, 0, 0, 0, ids)

    def computed(self, worker: int, number: int) -> None:
        self._computing.cut(worker, number, 0)

    def match(self, namespace: str, ids: bytes) -> dict[int, int]:
        """Worker -> leading tokens of `ids` that it holds or is computing; workers with none are absent."""
        hits = dict(self._cached.match(namespace, ids))
        for worker, length in self._computing.match(namespace, ids):
            if length > hits.get(worker, 0):
                hits[worker] = length
        return hits
