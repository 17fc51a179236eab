"""The tier on disk, below host memory: what a request leaves is written behind it, and what a request needs is read
before it is admitted. Nothing here waits for the disk. Integers and bytes only.

    device       --copied, stays there-->  lent slots of host memory  --written-->  blocks on disk
    host memory  ------------------------------------------------------written-->
    host memory  <--adopted--------------  lent slots of host memory  <-----read--

Writing (`disk_writes`): a request that leaves its row notes its path. Pages that no block has yet are copied to slots
that host memory lends, as part of a step; once that step has ended well they are written. What is on disk stays there
while it is elsewhere, so nothing is lost when host memory evicts it; what is gone before it was written is lost.

Reading (`disk_reads`): when a request arrives, blocks are read that follow what device and host memory have of its
path, if that is faster than to compute them (`disk_policy`). The request waits for them, for a bounded time, and finds
them in host memory, from where they are copied as any others. A read that fails is a miss.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from radixrt.messages import TOKEN_BYTES
from radixrt.messages.digests import prefix_digest
from radixrt.messages.namespace import namespaces_of
from radixrt.tree import RadixTree
from radixrt.worker.cache import disk_policy as policy
from radixrt.worker.cache.disk_figures import Disk, DiskFigures
from radixrt.worker.cache.disk_ghosts import Ghosts
from radixrt.worker.cache.disk_index import DiskIndex, Entry, runs
from radixrt.worker.cache.disk_reads import DiskReader
from radixrt.worker.cache.disk_states import DiskState, DiskStates
from radixrt.worker.cache.disk_writes import DiskWriter
from radixrt.worker.cache.host_tier import HostTier
from radixrt.worker.cache.recurrent_states import AnyStates
from radixrt.worker.cache.tier import Event, Tier, Tokens
from radixrt.worker.disk.block import Block
from radixrt.worker.plan import Moves
from radixrt.worker.prefill_cost import PrefillCost

MAX_STATES = 1 << 14
"""The most checkpoints of recurrent states on disk that are used: the router has an array of so many."""
MAX_REMOVED = 64
"""Blocks that are removed from the tree in one turn of the worker's loop."""


class DiskTier(Tier):
    """On `disk`, below `host`. With `events` changes are recorded for the router's index; `first_state`: the number of
    slots of states before those here. `block_bytes`: see `disk_policy`."""

    keeps = True

    def __init__(
        self,
        host: HostTier,
        disk: Disk,
        page_size: int,
        events: bool = True,
        first_state: int = 0,
        block_bytes: int = policy.BLOCK_BYTES,
    ) -> None:
        self.host = host
        self.figures = DiskFigures()
        self.prefill_cost = PrefillCost()
        self.index = DiskIndex(page_size, events)
        self.states = DiskStates(MAX_STATES if disk.state_bytes else 0, first_state, events)
        self._disk = disk
        self._page_size = page_size
        parts = host, disk, self.index, self.states, self.figures, page_size
        self._writer = DiskWriter(*parts, policy.pages_in_block(disk.page_bytes, block_bytes))
        self._reader = DiskReader(*parts)
        self._ghosts = Ghosts()
        self._gone: deque[int] = deque()
        """Numbers of blocks that the store does not have any more, and the tree still has."""
        self._add(disk.blocks())

    def attach(self, device: RadixTree, states: AnyStates) -> None:
        """The tree and the states of the device above; called once, before anything else."""
        self._writer.attach(device, states)
        self._reader.attach(device)

    # ------------------------------------------------------------ as host memory

    @property
    def version(self) -> int:
        """Changes whenever `reach`, or a state, may be another: they are those of host memory."""
        return self.host.version

    @property
    def used_bytes(self) -> int:
        """Bytes of all that is in the disk's folder."""
        return self._disk.used

    @property
    def used_pages(self) -> int:
        return self.host.used_pages

    @property
    def is_onloading(self) -> bool:
        return self.host.is_onloading

    @property
    def onloaded_pages(self) -> int:  # type: ignore[override]
        return self.host.onloaded_pages

    @property
    def lost_pages(self) -> int:  # type: ignore[override]
        """Pages that were gone before they were written, or that are gone from disk, since start."""
        return (self.figures.lost_tokens + self.figures.evicted_tokens) // self._page_size

    def evict(self, tree: RadixTree, tokens: int) -> np.ndarray:
        return self.host.evict(tree, tokens)

    def reach(self, namespace: str, tokens: Tokens, start: int) -> int:
        return self.host.reach(namespace, tokens, start)

    def hold(self, namespace: str, tokens: Tokens, start: int) -> np.ndarray:
        return self.host.hold(namespace, tokens, start)

    def onload(self, slots: np.ndarray, pages: np.ndarray) -> None:
        self.host.onload(slots, pages)

    def deepest_state(self, namespace: str, tokens: Tokens, most: int) -> tuple[int, int]:
        return self.host.deepest_state(namespace, tokens, most)

    def hold_state(self, slot: int) -> None:
        self.host.hold_state(slot)

    # ------------------------------------------------------------ steps

    def drain(self) -> Moves | None:
        self._writer.planned()
        return self.host.drain()

    def drain_idle(self) -> Moves | None:
        """The copies that can be made without a step, while none is in flight; `applied` is to follow."""
        if self.host.is_onloading or not (self.host.is_offloading or self._writer.has_begun):
            return None
        moves = self.drain()
        if moves is None:  # all that is to be written is in host memory
            self.applied()
        return moves

    def applied(self) -> None:
        self._writer.applied()

    def reset(self) -> bool:
        self._writer.reset()
        return self.host.reset()

    def poll(self) -> None:
        """Take note of what the disk has done, and go on. To be called in each turn of the worker's loop."""
        changes = self._disk.poll()
        for job in changes.finished:
            self._writer.ended(job) or self._reader.ended(job)
        if changes.added:
            self._add(changes.added)
        self._gone += changes.removed
        self._remove_gone()
        self._reader.issue()
        self._writer.issue()
        self._writer.begin()

    @property
    def is_busy(self) -> bool:
        """Whether `poll` is to be called soon again."""
        return bool(self._writer.is_busy or self._reader.is_busy or self._gone)

    def _add(self, blocks: list[Block]) -> None:
        self.index.add(block for block in blocks if block.kind == "kv")
        for block in blocks:
            above = None if block.parent is None else self.index.by_number(block.parent)
            if block.kind != "state" or above is None or not above.start < block.start <= above.stop:
                continue
            path = self.index.path(above.handle)[: block.start * TOKEN_BYTES]
            prefix = block.start, prefix_digest(block.namespace, path)
            self.states.add(DiskState(block.number, above.handle, prefix, block.nbytes, ready=True))

    def _remove_gone(self) -> None:
        handles = []
        for _ in range(min(MAX_REMOVED, len(self._gone))):
            number = self._gone.popleft()
            if (state := self.states.by_number(number)) is not None:
                self.states.remove(state)
            elif (entry := self.index.by_number(number)) is not None:
                handles.append(entry.handle)
        if handles:
            for chain, path in self.index.chains(self.index.below(handles)):
                self._ghosts.add(chain, path)
            gone = self._remove(handles)
            self.figures.evicted_tokens += sum(entry.stop - entry.start for entry in gone)

    def _remove(self, handles: list[int]) -> list[Entry]:
        gone = self.index.remove(handles)
        self.states.remove_below(entry.handle for entry in gone)
        return gone

    # ------------------------------------------------------------ requests

    def note(self, namespace: str, ids: memoryview) -> None:
        self._writer.note(namespace, bytes(ids))

    def prefetch(self, namespace: str, tokens: Tokens, most: int, hit: int) -> int:
        ids = bytes(tokens)
        self.figures.early_tokens += self._ghosts.asked(namespace, ids, hit)
        return self._reader.begin(namespace, ids, most, hit, self.prefill_cost)

    def fetched(self) -> list[int]:
        found, self._reader.ready = self._reader.ready, []
        return found

    def stop_waiting(self, fetch: int) -> None:
        self._reader.stop_waiting(fetch)

    # ------------------------------------------------------------ what clients ask for

    def offload(self, namespace: str, path: bytes, pages: np.ndarray) -> None:
        self.host.offload(namespace, path, pages)

    def deep_reach(self, namespace: str, tokens: Tokens, start: int) -> int:
        return self.host.reach(
            namespace, tokens, max(self.host.reach(namespace, tokens, start), self._on_disk(namespace, tokens))
        )

    def _on_disk(self, namespace: str, tokens: Tokens) -> int:
        """How many leading tokens can be read."""
        return self.index.readable(self.index.handles(namespace, tokens)) * self._page_size

    def retain(self, namespace: str, path: bytes, priority: int, seconds: float, now: float, name: int) -> int:
        return self.host.retain(namespace, path, priority, seconds, now, name)

    def release(self, name: int) -> None:
        self.host.release(name)

    def share(self, namespace: str, path: bytes) -> int | None:
        """The workers of one machine read the same folder. What is not there yet is written."""
        if not self._disk.serves or not self._disk.keeps(namespace):
            return None
        whole = len(path) // (self._page_size * TOKEN_BYTES) * self._page_size
        found = self._on_disk(namespace, path)
        if found < whole:
            self._writer.note(namespace, path[: whole * TOKEN_BYTES])
        return found

    def delete(self, tenant: str) -> None:
        self.host.delete(tenant)
        self._writer.forget_tenant(tenant)
        prefix = namespaces_of(tenant)
        self._remove([one.handle for one in self.index if not one.parent and one.namespace.startswith(prefix)])
        self._disk.delete_namespaces(prefix)

    # ------------------------------------------------------------ all of it

    def forget(self, namespace: str, path: Tokens, keep: int) -> None:
        self.host.forget(namespace, path, keep)
        ids = bytes(path)
        self._writer.forget(namespace, ids, keep)
        handles = self.index.handles(namespace, ids)[keep // self._page_size :]
        if len(handles):
            gone = self._remove([handle for _, _, handle in runs(handles)])
            self._disk.delete([entry.number for entry in gone if entry.number])

    def clear(self) -> None:
        """Remove everything from host memory but what is held; what is on disk stays."""
        self.host.clear()

    def erase(self) -> None:
        """Remove everything from disk that others do not use: all of this fingerprint."""
        self._writer.forget_all()
        heads = [entry for entry in self.index if not entry.parent]
        gone = self._remove([entry.handle for entry in heads])
        self._disk.delete([entry.number for entry in gone if entry.number])

    def drain_events(self) -> list[Event]:
        return [*self.host.drain_events(), *self.index.drain_events(), *self.states.drain_events()]

    def resync_events(self) -> list[Event]:
        return [*self.host.resync_events(), *self.index.resync_events(), *self.states.resync_events()]

    def check(self) -> None:
        self.host.check()
        self.index.check()
        self.host.check_lent([*self._writer.lent(), *self._reader.lent()])
