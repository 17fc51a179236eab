"""Which paths have their KV on disk, and in which blocks (see `radixrt.worker.disk`): the tree of the disk tier.

    path      a b c d e f g h i        every page of the tree names a block by its handle; a block is a run of pages of
    handles   1 1 1 1 2 2 2 3 3        one path, and hangs below a page of another block, or at the root
                  |
                  +-- x y z            block 4, whose parent is 1, begins in the middle of it
                      4 4 4

A block that is being written is here too, so that nobody writes it twice, but cannot be read yet. Workers that share a
folder may have written the same pages: the tree names one of the blocks, and the other one takes its place if it goes.
Integers and bytes only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from radixrt.messages import TOKEN_BYTES
from radixrt.tree import RadixTree, common_length
from radixrt.worker.cache.tier import Event, Tokens
from radixrt.worker.disk.block import Block

DISK_RUNS = -(1 << 40)
"""Runs of this tree have numbers from here on downwards, in events for the router's index."""


class Entry:
    """A block of KV pages. `number` is its number in the store, 0 until it has one; `parent` a handle, 0: the root."""

    __slots__ = ("handle", "ids", "namespace", "nbytes", "number", "parent", "ready", "start")

    def __init__(
        self, handle: int, number: int, namespace: str, parent: int, start: int, ids: bytes, nbytes: int, ready: bool
    ) -> None:
        self.handle = handle
        self.number = number
        self.namespace = namespace
        self.parent = parent
        self.start = start
        """Tokens before it."""
        self.ids = ids
        self.nbytes = nbytes
        self.ready = ready
        """Whether it can be read."""

    @property
    def stop(self) -> int:
        return self.start + len(self.ids) // TOKEN_BYTES


class DiskIndex:
    """The blocks of one fingerprint, of whole pages of `page_size` tokens."""

    def __init__(self, page_size: int, events: bool = True) -> None:
        self.tree = RadixTree(page_size, events=events)
        self.nbytes = 0
        """Of all blocks."""
        self.changes = 0
        """How often blocks have become readable, which does not change the tree's version."""
        self._page_size = page_size
        self._entries: list[Entry | None] = [None]
        """By handle."""
        self._free: list[int] = []
        self._handles: dict[int, int] = {}
        """By number."""
        self._kids: dict[int, set[int]] = {}
        """By handle, those of the blocks whose parent it is."""
        self._twins: dict[int, set[int]] = {}
        """By handle of a block that pages name: other blocks that have some of these pages."""

    def __len__(self) -> int:
        return len(self._entries) - 1 - len(self._free)

    @property
    def version(self) -> int:
        """Changes whenever `runs` may find more or less."""
        return self.tree.version + self.changes

    def __iter__(self) -> Iterator[Entry]:
        return (entry for entry in self._entries if entry is not None)

    def contains(self, entry: Entry) -> bool:
        """Whether a block is still here."""
        return self._entries[entry.handle] is entry

    def of(self, handle: int) -> Entry:
        entry = self._entries[handle]
        assert entry is not None
        return entry

    def by_number(self, number: int) -> Entry | None:
        handle = self._handles.get(number)
        return None if handle is None else self._entries[handle]

    # ------------------------------------------------------------ look-ups

    def handles(self, namespace: str, tokens: Tokens, limit: int | None = None) -> np.ndarray:
        """int32: the block of each page of `tokens`, as far as they are here, those being written included."""
        return np.frombuffer(self.tree.match(namespace, tokens, limit).values(), np.int32)

    def readable(self, handles: np.ndarray) -> int:
        """How many of the handles of a path, from the first on, are of blocks that can be read."""
        for first, _, handle in runs(handles):
            if not self.of(handle).ready:
                return first
        return len(handles)

    def path(self, handle: int) -> bytes:
        """The tokens from the root to the end of a block, int32."""
        entry = self.of(handle)
        parts, stop = [entry.ids], entry.start
        while entry.parent:
            entry = self.of(entry.parent)
            parts.append(entry.ids[: (stop - entry.start) * TOKEN_BYTES])
            stop = entry.start
        return b"".join(reversed(parts))

    # ------------------------------------------------------------ blocks come

    def begin(self, namespace: str, path: bytes, parent: int, start: int, nbytes: int) -> Entry:
        """A block is about to be written: the tokens of `path` after its first `start`, which are not here yet."""
        entry = self._new(0, namespace, parent, start, path[start * TOKEN_BYTES :], nbytes, ready=False)
        values = np.full(len(path) // TOKEN_BYTES // self._page_size, entry.handle, dtype=np.int32)
        present = self.tree.insert(namespace, path, values)
        assert present == start, "it follows what is here"
        return entry

    def numbered(self, entry: Entry, number: int) -> None:
        """The store writes a block, under a number."""
        entry.number = number
        self._handles[number] = entry.handle

    def written(self, entry: Entry, nbytes: int) -> None:
        """A block can be read from now on."""
        entry.ready = True
        self.nbytes += nbytes - entry.nbytes
        entry.nbytes = nbytes
        self.changes += 1

    def add(self, blocks: Iterable[Block]) -> None:
        """Blocks that the store has, parents first. Those that are known or do not fit what is here are left out."""
        kids: dict[int, list[Entry]] = {}
        heads: list[Entry] = []
        known, page = self._handles, self._page_size * TOKEN_BYTES
        for block in blocks:
            parent = 0 if block.parent is None else known.get(block.parent, -1)
            bad = block.number in known or parent < 0 or not block.ids or len(block.ids) % page
            if bad or block.start % self._page_size or (not parent and block.start):
                continue
            if parent:
                above = self.of(parent)
                if above.namespace != block.namespace or not above.start < block.start <= above.stop:
                    continue
            entry = self._new(
                block.number, block.namespace, parent, block.start, block.ids, block.nbytes, ready=True
            )  # fmt: skip
            known[block.number] = entry.handle
            if parent in kids:
                kids[parent].append(entry)
            else:
                heads.append(entry)
            kids[entry.handle] = []
        self.changes += 1
        for head in heads:
            before = self.path(head.parent)[: head.start * TOKEN_BYTES] if head.parent else b""
            self._insert(head, before, kids)

    def _insert(self, head: Entry, above: bytes, kids: dict[int, list[Entry]]) -> None:
        """Insert new blocks into the tree, from `head` down, whose path begins with `above`: chains of them at once."""
        waiting = [(head, above)]
        while waiting:
            last, above = waiting.pop()
            chain = [last]
            while below := kids[last.handle]:
                follows = next((kid for kid in below if kid.start == last.stop), None)
                if len(below) > 1 or follows is None:
                    whole = b"".join([above, *[x.ids for x in chain]])
                    waiting += [(kid, whole[: kid.start * TOKEN_BYTES]) for kid in below if kid is not follows]
                if follows is None:
                    break
                chain.append(last := follows)
            self._insert_chain(chain, above)

    def _insert_chain(self, chain: list[Entry], above: bytes) -> None:
        size, start = self._page_size * TOKEN_BYTES, chain[0].start
        handles = np.repeat(
            np.array([0, *[x.handle for x in chain]], dtype=np.int32),
            [len(above) // size, *[len(x.ids) // size for x in chain]],
        )
        path = b"".join([above, *[x.ids for x in chain]])
        present = self.tree.insert(chain[0].namespace, path, handles)
        if present <= start:
            return
        named = self.handles(chain[0].namespace, path, present)
        for first, stop, handle in runs(named[start // self._page_size :]):
            begin, end = start + first * self._page_size, start + stop * self._page_size
            twins = {x.handle for x in chain if x.start < end and x.stop > begin}
            self._twins[handle] = self._twins.get(handle, set()) | twins

    def _new(
        self, number: int, namespace: str, parent: int, start: int, ids: bytes, nbytes: int, ready: bool
    ) -> Entry:  # fmt: skip
        if self._free:
            handle = self._free.pop()
        else:
            handle = len(self._entries)
            self._entries.append(None)
        entry = self._entries[handle] = Entry(handle, number, namespace, parent, start, ids, nbytes, ready)
        if parent:
            if parent in self._kids:
                self._kids[parent].add(handle)
            else:
                self._kids[parent] = {handle}
        self.nbytes += nbytes
        return entry

    # ------------------------------------------------------------ blocks go

    def below(self, handles: Iterable[int]) -> set[int]:
        """These blocks and all that come after them."""
        found: set[int] = set()
        more = set(handles)
        while more:
            found |= more
            more = {kid for handle in more for kid in self._kids.get(handle, ())} - found
        return found

    def chains(self, going: set[int]) -> list[tuple[list[Entry], bytes]]:
        """These blocks as chains, each with the path to its end: of blocks that begin where the one before ends. One
        that several go on from is in several chains."""
        entries = [self.of(handle) for handle in going]
        follows = {entry.parent for entry in entries if self._is_next(entry, going)}
        found = []
        for last in entries:
            if last.handle in follows:
                continue
            chain, entry = [last], last
            while self._is_next(entry, going):
                chain.append(entry := self.of(entry.parent))
            found.append((chain, self.path(last.handle)))
        return found

    def _is_next(self, entry: Entry, going: set[int]) -> bool:
        return entry.parent in going and entry.start == self.of(entry.parent).stop

    def remove(self, handles: Iterable[int]) -> list[Entry]:
        """Remove blocks and all that come after them. Returns them. Pages that others have as well stay."""
        going = self.below(handles)
        entries = [self.of(handle) for handle in going]
        chains = sorted(self.chains(going), key=lambda chain: -chain[0][0].start)
        goes = np.zeros(len(self._entries), dtype=bool)
        goes[list(going)] = True
        for entry in entries:
            if entry.handle in self._twins:
                self._hand_over(entry, self.path(entry.handle), going)
        for chain, path in chains:
            self._cut(chain[0].namespace, path, goes)
        for entry in entries:
            self._drop(entry)
        return entries

    def _cut(self, namespace: str, path: bytes, goes: np.ndarray) -> None:
        """Take out of the tree the pages at the end of a path that name blocks that go; `goes`: by handle."""
        match = self.tree.match(namespace, path)
        stay = np.flatnonzero(~goes[np.frombuffer(match.values(), np.int32)])
        keep = (int(stay[-1]) + 1) * self._page_size if len(stay) else 0
        self.tree.forget(namespace, path[: match.length * TOKEN_BYTES], keep)

    def _hand_over(self, entry: Entry, path: bytes, going: set[int]) -> None:
        """Let others have the pages that name a block, as far as they have them."""
        size, twins = self._page_size, self._twins.pop(entry.handle) - going
        with self.tree.lease(self.tree.match(entry.namespace, path)) as lease:
            named = np.frombuffer(lease.values(), np.int32).copy()
            for twin in twins:
                other = self._entries[twin]  # or another one that has its handle now
                if other is None or other.namespace != entry.namespace or not other.ready:
                    continue
                part = named[other.start // size : common_length(path, self.path(twin)) // size]
                if (part == entry.handle).any():
                    part[part == entry.handle] = twin
                    self._twins[twin] = self._twins.get(twin, set()) | (twins - {twin})
            lease.assign(0, named)

    def _drop(self, entry: Entry) -> None:
        self._entries[entry.handle] = None
        self._free.append(entry.handle)
        self._handles.pop(entry.number, None)
        self._twins.pop(entry.handle, None)
        self._kids.pop(entry.handle, None)
        if entry.parent in self._kids:
            self._kids[entry.parent].discard(entry.handle)
        self.nbytes -= entry.nbytes

    # ------------------------------------------------------------ events

    def drain_events(self) -> list[Event]:
        """As those of `PrefixCache`."""
        return [*_renumbered(self.tree.drain_events())]

    def resync_events(self) -> list[Event]:
        """As those of `PrefixCache`, to follow those of other tiers."""
        return [*_renumbered(self.tree.snapshot()[1:])]

    def check(self) -> None:
        """Assert all invariants."""
        self.tree.check()
        named = set(np.frombuffer(self.tree.values(), np.int32).tolist())
        assert named <= {entry.handle for entry in self}, "every page names a block"
        assert self.nbytes == sum(entry.nbytes for entry in self)
        for entry in self:
            path = self.path(entry.handle)
            assert self.tree.match(entry.namespace, path).length * TOKEN_BYTES == len(path), "a block's path is there"
            assert not entry.number or self._handles[entry.number] == entry.handle
            if entry.parent:
                assert entry.handle in self._kids[entry.parent]
                assert self.of(entry.parent).start < entry.start <= self.of(entry.parent).stop
        for handle in named:
            entry = self.of(handle)
            assert self._at(entry), "a block that pages name has these pages"

    def _at(self, entry: Entry) -> bool:
        path = self.path(entry.handle)
        values = np.frombuffer(self.tree.match(entry.namespace, path).values(), np.int32)
        return bool((values[entry.start // self._page_size :] == entry.handle).any())


def runs(handles: np.ndarray) -> list[tuple[int, int, int]]:
    """(first, stop, handle) of each run of equal handles."""
    if not len(handles):
        return []
    starts = np.flatnonzero(np.diff(handles, prepend=handles[0] - 1))
    stops = np.append(starts[1:], len(handles))
    return list(zip(starts.tolist(), stops.tolist(), handles[starts].tolist(), strict=True))


def _renumbered(events: Sequence[Event]) -> Iterator[Event]:
    for event in events:
        match event:
            case ("stored", namespace, run, at, parent, parent_at, ids):
                yield "stored", namespace, DISK_RUNS - run, at, DISK_RUNS - parent, parent_at, ids
            case ("removed", run, keep):
                yield "removed", DISK_RUNS - run, keep
