"""The index of what every worker has cached, mirrored from its events, and of what is being computed where.

A worker describes its tree as runs. A run is a stretch of tokens that hangs below a prefix of another run:

    run 1  [ a b c d e f ]            parent 0 (the root)
    run 2        [ x y ]              parent 1, parent_at 3: its path is a b c x y

One tree mirrors the runs of all workers; common prefixes are stored once. It never guesses: after an event that does
not fit its content, a snapshot is requested, and until that arrives the worker counts as empty.
"""

from __future__ import annotations

from radixrt.messages import CacheEvent, Cleared, Removed, StepDone, Stored
from radixrt.tree import OwnerTree


class Index:
    """Which workers hold which prefixes. Workers are numbers >= 0 that are never reused (see Member)."""

    def __init__(self) -> None:
        self._cached = OwnerTree()
        self._computing = OwnerTree()
        self._next_seqs: dict[int, int | None] = {}
        """The sequence number of each worker's next event; None while a snapshot is awaited."""

    @property
    def tokens(self) -> int:
        """Distinct cached tokens over all workers."""
        return self._cached.tokens

    def add_worker(self, worker: int, *, fresh: bool) -> None:
        """Add a worker whose events begin at 0 (`fresh`), or one whose snapshot must come first."""
        self._next_seqs[worker] = 0 if fresh else None

    def drop_worker(self, worker: int) -> None:
        self._next_seqs.pop(worker, None)
        self._cached.remove_owner(worker)
        self._computing.remove_owner(worker)

    def awaits_snapshot(self, worker: int) -> bool:
        """Whether a worker's snapshot has not arrived yet; until then it counts as empty."""
        return self._next_seqs[worker] is None

    def apply(self, worker: int, step: StepDone) -> bool:
        """Apply the events of one message. False if some are missing: the caller must request a Snapshot."""
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
            self._apply_events(worker, step.events)
        except (ValueError, OverflowError):  # an event refers to a run that is not known
            self._empty(worker)
            return False
        return True

    def _empty(self, worker: int) -> None:
        self._next_seqs[worker] = None
        self._cached.remove_owner(worker)

    def _apply_events(self, worker: int, events: list[CacheEvent]) -> None:
        for event in events:
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
