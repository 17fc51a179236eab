"""What is below the device: tiers of larger and slower memory, to which pages go when they are evicted, and from which
they come back when a request needs them.

    device: PagePool, PrefixCache --evict--> HostTier --evict--> NullTier: lost
                                  <-onload--

A tier has a radix tree of its own, from tokens to its slots, and so is one cache with the device to the router: its
events have run numbers of their own (`HostTier` counts backwards). It only plans copies: `drain` hands them to the step
that is being planned, whose runner makes them.

Besides, a tier does what clients ask for (see `hints`): it takes what is demoted (`offload`), gives back what is
prefetched (`hold`, `onload`), evicts by priority what is retained, and deletes what a tenant has.

Below host memory there may be a disk (`disk_tier`): what it has comes to host memory before a request is admitted that
needs it, so that `reach` and `hold` are those of host memory.
"""

from __future__ import annotations

from array import array
from typing import Any, Protocol, TypeAlias

import numpy as np

from radixrt.tree import RadixTree
from radixrt.worker.plan import Moves
from radixrt.worker.prefill_cost import PrefillCost

Tokens: TypeAlias = "array[int] | np.ndarray | memoryview | bytes"
"""Token ids, int32."""
Event = tuple[Any, ...]
"""A change for the router's index: the tag of a message (`messages.Stored` and others), then its fields."""


class Tier(Protocol):
    """Memory below the device, in slots of one page each; and what there is of recurrent states (see
    `host_recurrent_states`), in slots of their own. What fails is a miss, never an error."""

    lost_pages: int
    """Pages that were evicted and are nowhere any more, since start."""
    onloaded_pages: int
    """Pages that were copied back since start."""
    keeps: bool
    """Whether what is evicted goes here; otherwise it is lost."""
    prefill_cost: PrefillCost = PrefillCost()
    """What it takes to compute, as measured; set by the worker's loop."""

    @property
    def version(self) -> int:
        """Changes whenever `reach`, or a state, may be another."""

    @property
    def used_pages(self) -> int:
        """Pages that it holds."""

    @property
    def is_onloading(self) -> bool:
        """Whether pages or states of the device are still to be filled before the next step."""

    def evict(self, tree: RadixTree, tokens: int) -> np.ndarray:
        """Evict at least so many tokens from the device's tree, in its order, and offload them here. Returns their
        pages, int32, which may be reused: copies of the next step come before whatever writes pages."""

    def reach(self, namespace: str, tokens: Tokens, start: int) -> int:
        """How many leading `tokens` can be had, of which the device has `start`, in whole pages."""

    def hold(self, namespace: str, tokens: Tokens, start: int) -> np.ndarray:
        """int32: the slots of the pages of `tokens` after the first `start`, as far as they are here without a gap.
        They are not reused before the next step."""

    def onload(self, slots: np.ndarray, pages: np.ndarray) -> None:
        """Copy slots that are held to pages of the device, before the next step."""

    def deepest_state(self, namespace: str, tokens: Tokens, most: int) -> tuple[int, int]:
        """(tokens, slot) of the deepest state checkpoint here after at most `most` tokens; (0, 0) if there is none."""

    def hold_state(self, slot: int) -> None:
        """Do not reuse the slot of a state before the next step."""

    def offload(self, namespace: str, path: bytes, pages: np.ndarray) -> None:
        """Copy `pages` here, int32, which are evicted from the device: those of the last tokens of `path`, int32
        bytes."""

    def deep_reach(self, namespace: str, tokens: Tokens, start: int) -> int:
        """As `reach`, with what is further below, and has to come here before."""

    def retain(self, namespace: str, path: bytes, priority: int, seconds: float, now: float, name: int) -> int:
        """Retain a path, int32 bytes, as far as it is here, as `Priorities` do. Returns how many tokens that are."""

    def release(self, name: int) -> None:
        """End the retention of that name, if there is one."""

    def share(self, namespace: str, path: bytes) -> int | None:
        """Let other workers have a path, int32 bytes, from a store that they read as well. Returns how many tokens of
        it are there now, others being on their way; None if there is no such store."""

    def delete(self, tenant: str) -> None:
        """Remove all that a tenant has, except what is held."""

    def drain(self) -> Moves | None:
        """The copies to be made before the step that is being planned; None if there are none."""

    def drain_idle(self) -> Moves | None:
        """The copies that can be made without a step, while none is in flight; `applied` is to follow. None if there
        are none."""
        return None

    def applied(self) -> None:
        """The first of the steps, or of the `drain_idle`s, that were planned and did not fail has ended."""
        return

    def reset(self) -> bool:
        """Remove everything, also the copies that are still to be made: a step has failed, and with it its copies.
        Returns whether anything of the device was still to be filled."""

    def forget(self, namespace: str, path: Tokens, keep: int) -> None:
        """Remove a path after its first `keep` tokens, except where others go on, and all state checkpoints there."""

    def clear(self) -> None:
        """Remove everything but pages that are held."""

    def drain_events(self) -> list[Event]:
        """As those of `PrefixCache`."""

    def resync_events(self) -> list[Event]:
        """As those of `PrefixCache`, to follow those of the device's tree."""

    # What only a tier does that keeps more than memory does:

    def note(self, namespace: str, ids: memoryview) -> None:
        """A request leaves a path of whole pages, int32, in the device's tree."""
        return

    def prefetch(self, namespace: str, tokens: Tokens, most: int, hit: int) -> int:
        """Begin to bring to memory what it lacks of a path, of which a request can use `most` tokens and has `hit`.
        Returns a number of what is on its way (see `fetched`); 0: there is nothing."""
        return 0

    def fetched(self) -> list[int]:
        """The numbers of what has arrived, or will not, since the last call."""
        return []

    def stop_waiting(self, fetch: int) -> None:
        """What is on its way under that number is not waited for any more."""
        return

    def poll(self) -> None:
        """Go on with what is on its way. To be called in each turn of the worker's loop."""
        return

    @property
    def is_busy(self) -> bool:
        """Whether `poll` is to be called soon again."""
        return False

    def erase(self) -> None:
        """Remove what would outlive the process."""
        return

    def check(self) -> None:
        """Assert all invariants."""


class NullTier(Tier):
    """The end of all tiers: what is evicted into it is lost."""

    version = used_pages = onloaded_pages = 0
    keeps = is_onloading = False

    def __init__(self) -> None:
        self.lost_pages = 0
        self._none = np.zeros(0, dtype=np.int32)

    def evict(self, tree: RadixTree, tokens: int) -> np.ndarray:
        pages = np.frombuffer(tree.evict(tokens), np.int32)
        self.lost_pages += len(pages)
        return pages

    def reach(self, namespace: str, tokens: Tokens, start: int) -> int:
        return start

    def hold(self, namespace: str, tokens: Tokens, start: int) -> np.ndarray:
        return self._none

    def deepest_state(self, namespace: str, tokens: Tokens, most: int) -> tuple[int, int]:
        return 0, 0

    def deep_reach(self, namespace: str, tokens: Tokens, start: int) -> int:
        return start

    def retain(self, namespace: str, path: bytes, priority: int, seconds: float, now: float, name: int) -> int:
        return 0

    def share(self, namespace: str, path: bytes) -> None:
        return None

    def drain(self) -> None:
        return None

    def reset(self) -> bool:
        return False

    def drain_events(self) -> list[Event]:
        return []

    def resync_events(self) -> list[Event]:
        return []

    def _nothing(self, *_: object, **__: object) -> None:
        pass

    onload = offload = release = delete = hold_state = forget = clear = check = _nothing
