"""The order in which checkpoints of recurrent states go when slots are short: least recently used first.

A conversation needs only its last checkpoint. So one that a request left counts as used longest ago once another
request has gone on from it. If it is used again, it is a branching point, and counts as any other:

    left by a request: last  --one goes on-->  spent, the first to go  --used again-->  as any other
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class CheckpointOrder:
    """Slots of checkpoints, the first to go first."""

    def __init__(self) -> None:
        self._slots: OrderedDict[int, None] = OrderedDict()
        self._last: set[int] = set()
        self._spent: set[int] = set()

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots)

    def __contains__(self, slot: int) -> bool:
        return slot in self._slots

    def is_last(self, slot: int) -> bool:
        """Whether a request left this checkpoint, and none has gone on from it yet."""
        return slot in self._last

    def is_spent(self, slot: int) -> bool:
        """Whether one request has gone on from what another one left, and it was not used again."""
        return slot in self._spent

    def add(self, slot: int, last: bool = False, spent: bool = False) -> None:
        """A slot has a checkpoint now, which is used now unless it is `spent`. If it had one, that is replaced."""
        self.remove(slot)
        self._slots[slot] = None
        if last:
            self._last.add(slot)
        if spent:
            self._spent.add(slot)
            self._slots.move_to_end(slot, last=False)

    def remove(self, slot: int) -> None:
        """A slot has no checkpoint any more, if it had one."""
        self._slots.pop(slot, None)
        self._last.discard(slot)
        self._spent.discard(slot)

    def touch(self, slot: int) -> None:
        """A checkpoint is used, if there is one in the slot."""
        if slot in self._slots:
            self._slots.move_to_end(slot)
            self._spent.discard(slot)

    def go_on(self, slot: int) -> bool:
        """A request goes on from a checkpoint, if there is one in the slot. Whether that makes it spent."""
        self.touch(slot)
        if slot not in self._last:
            return False
        self.add(slot, spent=True)
        return True

    def take_back(self, slot: int) -> None:
        """The request that made it spent does not go on from it after all."""
        if slot in self._slots:
            self.add(slot, last=True)
