"""The index of what every worker has cached, mirrored from its events, and of what is being computed where.

A worker describes its tree as runs. A run is a stretch of tokens that hangs below a prefix of another run:

    run 1  [ a b c d e f ]            parent 0 (the root)
    run 2        [ x y ]              parent 1, parent_at 3: its path is a b c x y

One tree mirrors the runs of all workers; common prefixes are stored once. It never guesses: after an event that does
not fit its content, a resync is requested, and until that arrives the worker counts as empty.

If a worker's model has recurrent states, a prefix counts up to the last token after which the worker has a checkpoint
of its state: tokens after that are computed again although they are cached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from radixrt.messages import TOKEN_BYTES, CacheEvent, Cleared, Dropped, Removed, Saved, StepDone, Stored
from radixrt.messages.digests import prefix_digests
from radixrt.tree import OwnerTree, RadixTree

if TYPE_CHECKING:
    from radixrt.tree._radix import Edge, Node


class StateCheckpoints:
    """The checkpoints of recurrent states of one worker, by slot."""

    def __init__(self, slots: int) -> None:
        self._tokens = np.zeros(slots, dtype=np.int64)
        """Length of the prefix; 0: there is no checkpoint in the slot."""
        self._digests = np.zeros(slots, dtype=np.uint64)

    def save(self, event: Saved) -> None:
        """Raises ValueError for a slot that does not exist."""
        self._check(event.slot)
        self._tokens[event.slot], self._digests[event.slot] = event.tokens, event.digest

    def drop(self, slot: int) -> None:
        self._check(slot)
        self._tokens[slot] = 0

    def clear(self) -> None:
        self._tokens[:] = 0

    def deepest(self, digests: np.ndarray, most: int) -> int:
        """The longest prefix with a checkpoint, of at most `most` tokens, in tokens; `digests` of all prefixes, by
        length."""
        lengths = np.where(self._tokens <= most, self._tokens, 0)
        return int((lengths * (digests[lengths] == self._digests)).max(initial=0))

    def _check(self, slot: int) -> None:
        if not 0 < slot < len(self._tokens):
            raise ValueError(f"there is no slot {slot}")


_NONE = StateCheckpoints(0)
Cut = tuple[str, int, int, bytes]
"""A part of a path that a worker has removed: the namespace, the tokens above it, its tokens, the first few of them."""
NodeName = tuple[int, int]
"""As `OwnerTree` names nodes."""


class Index:
    """Which workers hold which prefixes. Workers are numbers >= 0 that are never reused (see Worker)."""

    def __init__(self) -> None:
        self._cached = OwnerTree()
        self._computing = OwnerTree()
        self._next_seqs: dict[int, int | None] = {}
        """The sequence number of each worker's next event; None while a resync is awaited."""
        self._checkpoints: dict[int, StateCheckpoints] = {}
        """Of the workers whose models have recurrent states."""
        self.removed: list[Cut] = []
        """What the last message of a worker has removed."""

    @property
    def tokens(self) -> int:
        """Distinct cached tokens over all workers."""
        return self._cached.tokens

    def namespaces(self) -> dict[str, int]:
        """Cached tokens by namespace. Walks the tree, as the next two do."""
        return self._cached.namespaces()

    def icicle(self, prefix: str, most: int, seen: RadixTree, node: NodeName | None) -> tuple[int, list[Node]] | None:
        """See OwnerTree."""
        return self._cached.icicle(prefix, most, seen, *(node or (None, 0)))

    def edge(self, prefix: str, most: int, node: NodeName) -> Edge | None:
        """See OwnerTree."""
        return self._cached.edge(prefix, most, *node)

    def add_worker(self, worker: int, *, fresh: bool, num_states: int = 0) -> None:
        """Add a worker whose events begin at 0 (`fresh`), or one whose resync must come first. `num_states` is that
        of its Register."""
        self._next_seqs[worker] = 0 if fresh else None
        if num_states:
            self._checkpoints[worker] = StateCheckpoints(num_states)

    def drop_worker(self, worker: int) -> None:
        self._next_seqs.pop(worker, None)
        self._checkpoints.pop(worker, None)
        self._cached.remove_owner(worker)
        self._computing.remove_owner(worker)

    def awaits_resync(self, worker: int) -> bool:
        """Whether a worker's resync has not arrived yet; until then it counts as empty."""
        return self._next_seqs[worker] is None

    def apply(self, worker: int, step: StepDone) -> bool:
        """Apply the events of one message. False if some are missing: the caller must request a Resync."""
        next_seq, self.removed = self._next_seqs[worker], []
        if step.resync:
            self._clear(worker)
        elif next_seq is None:
            return True
        elif step.seq != next_seq:
            self._empty(worker)
            return False
        self._next_seqs[worker] = step.seq if step.resync else step.seq + len(step.events)
        try:
            self._apply_events(worker, step.events)
        except (ValueError, OverflowError):  # an event refers to a run or a slot that is not known
            self._empty(worker)
            return False
        return True

    def _empty(self, worker: int) -> None:
        self._next_seqs[worker] = None
        self._clear(worker)

    def _clear(self, worker: int) -> None:
        self._cached.remove_owner(worker)
        self._checkpoints.get(worker, _NONE).clear()

    def _apply_events(self, worker: int, events: list[CacheEvent]) -> None:
        for event in events:
            match event:
                case Stored():
                    self._cached.store(
                        worker, event.namespace, event.run, event.at, event.parent, event.parent_at, event.ids
                    )
                case Removed():
                    self.removed.append(self._cached.cut(worker, event.run, event.keep))
                case Saved():
                    self._checkpoints.get(worker, _NONE).save(event)
                case Dropped():
                    self._checkpoints.get(worker, _NONE).drop(event.slot)
                case Cleared():
                    self._clear(worker)

    def computing(self, worker: int, number: int, namespace: str, ids: bytes) -> None:
        """A prompt was sent to `worker`, under a number that no other has there: until it is `computed`, others are
        placed as if it were cached."""
        self._computing.store(worker, namespace, number, 0, 0, 0, ids)

    def computed(self, worker: int, number: int) -> None:
        self._computing.cut(worker, number, 0)

    def match(self, namespace: str, ids: bytes, most: int | None = None) -> dict[int, int]:
        """Worker -> leading tokens of `ids` that it holds or is computing; workers with none are absent. Of a prefix
        that can be continued only after a checkpoint, those up to the last checkpoint within `most` tokens count."""
        hits = dict(self._cached.match(namespace, ids))
        if not self._checkpoints.keys().isdisjoint(hits):
            hits = self._continuable(hits, namespace, ids, most)
        for worker, length in self._computing.match(namespace, ids):
            if length > hits.get(worker, 0):
                hits[worker] = length
        return hits

    def _continuable(self, hits: dict[int, int], namespace: str, ids: bytes, most: int | None) -> dict[int, int]:
        """`hits`, of workers with recurrent states only as far as checkpoints reach."""
        limit = max(hits.values()) if most is None else min(max(hits.values()), most)
        digests = prefix_digests(namespace, ids[: limit * TOKEN_BYTES])
        continuable = {}
        for worker, hit in hits.items():
            checkpoints = self._checkpoints.get(worker)
            hit = hit if checkpoints is None else checkpoints.deepest(digests, min(hit, limit))
            if hit:
                continuable[worker] = hit
        return continuable
