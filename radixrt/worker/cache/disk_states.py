"""Which prefixes have a checkpoint of their recurrent state on disk. Integers and bytes only.

A checkpoint is found by the digest of its prefix; that the prefix is the very same its caller has to see."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from radixrt.messages import TOKEN_BYTES
from radixrt.messages.digests import prefix_digests
from radixrt.worker.cache.host_recurrent_states import Prefix
from radixrt.worker.cache.tier import Event


class DiskState:
    """A checkpoint: `number` of its block in the store, 0 until it has one; the handle of the block of KV pages in
    which its prefix ends (see `disk_index`)."""

    __slots__ = ("handle", "nbytes", "number", "prefix", "ready", "slot")

    def __init__(self, number: int, handle: int, prefix: Prefix, nbytes: int, ready: bool) -> None:
        self.number = number
        self.handle = handle
        self.prefix = prefix
        self.nbytes = nbytes
        self.ready = ready
        self.slot = 0


class DiskStates:
    """At most `most` checkpoints, which the router's index knows by their slots here, from 1 on, plus `first`."""

    def __init__(self, most: int, first: int, events: bool = True) -> None:
        self.nbytes = 0
        self._first = first
        self._tokens = np.zeros(most + 1, dtype=np.int64)
        self._digests = np.zeros(most + 1, dtype=np.uint64)
        self._states: list[DiskState | None] = [None] * (most + 1)
        """By slot."""
        self._free = list(range(most, 0, -1))
        self._of_prefix: dict[Prefix, DiskState] = {}
        self._of_number: dict[int, DiskState] = {}
        self._of_handle: dict[int, set[DiskState]] = {}
        self._events: list[Event] | None = [] if events else None

    def __len__(self) -> int:
        return len(self._of_prefix)

    def has(self, prefix: Prefix) -> bool:
        """Whether a checkpoint is on disk or is being written."""
        return prefix in self._of_prefix

    def by_number(self, number: int) -> DiskState | None:
        return self._of_number.get(number)

    def deepest(self, namespace: str, ids: bytes, most: int) -> DiskState | None:
        """The checkpoint that can be read of the longest prefix of `ids`, int32, of at most `most` tokens, by its
        digest."""
        if not self._of_number:
            return None
        digests = prefix_digests(namespace, ids[: most * TOKEN_BYTES])
        lengths = np.where(self._tokens < len(digests), self._tokens, 0)
        lengths = lengths * (digests[lengths] == self._digests)
        slot = int(lengths.argmax())
        return self._states[slot] if lengths[slot] else None

    def add(self, state: DiskState) -> bool:
        """False if the prefix has one, or there is no room."""
        if state.prefix in self._of_prefix or not self._free:
            return False
        self._of_prefix[state.prefix] = state
        self._of_handle.setdefault(state.handle, set()).add(state)
        self.nbytes += state.nbytes
        state.slot = self._free.pop()
        self._states[state.slot] = state
        if state.ready:
            self.written(state)
        return True

    def written(self, state: DiskState) -> None:
        """A checkpoint can be read from now on."""
        state.ready = True
        self._of_number[state.number] = state
        self._tokens[state.slot], self._digests[state.slot] = state.prefix
        if self._events is not None:
            self._events.append(("saved", self._first + state.slot, *state.prefix))

    def contains(self, state: DiskState) -> bool:
        return self._of_prefix.get(state.prefix) is state

    def remove(self, state: DiskState) -> None:
        """A checkpoint is gone."""
        del self._of_prefix[state.prefix]
        self._of_number.pop(state.number, None)
        self._of_handle[state.handle].discard(state)
        if not self._of_handle[state.handle]:
            del self._of_handle[state.handle]
        self.nbytes -= state.nbytes
        self._states[state.slot] = None
        self._free.append(state.slot)
        self._tokens[state.slot] = 0
        if state.ready and self._events is not None:
            self._events.append(("dropped", self._first + state.slot))

    def remove_below(self, handles: Iterable[int]) -> None:
        """Those are gone whose pages are."""
        for handle in handles:
            for state in list(self._of_handle.get(handle, ())):
                self.remove(state)

    def drain_events(self) -> list[Event]:
        events, self._events = self._events or [], [] if self._events is not None else None
        return events

    def resync_events(self) -> list[Event]:
        self.drain_events()
        return [("saved", self._first + state.slot, *state.prefix) for state in self._of_number.values()]
