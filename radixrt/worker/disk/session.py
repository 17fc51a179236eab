"""What a store does while it has its index open."""

from __future__ import annotations

import contextlib
import errno
import sqlite3
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from radixrt.worker.disk.block import Block, StoreState
from radixrt.worker.disk.files import Files, aligned
from radixrt.worker.disk.health import Clocks, trouble
from radixrt.worker.disk.inbox import Deletion, Inbox
from radixrt.worker.disk.index import Hole, Index, Segment
from radixrt.worker.disk.ledger import Ledger
from radixrt.worker.disk.limits import Limits
from radixrt.worker.disk.loading import Loader
from radixrt.worker.disk.seals import BadSeal, Seals
from radixrt.worker.disk.segments import Writer, is_segment, reclaim
from radixrt.worker.disk.space import Space
from radixrt.worker.disk.tasks import GivenUp, Place, Read, Write

_COMMITS = 64
"""Until it is looked again what others did."""
_DELETED = 4096
"""Blocks that one transaction deletes at most."""


class Setting(NamedTuple):
    """What the store's parts share."""

    folder: Path
    files: Files
    seals: Seals
    rank: int
    ranks: int
    limits: Limits
    space: Space
    ledger: Ledger
    clocks: Clocks
    inbox: Inbox
    places: dict[int, Place]
    """Of this rank's parts of all blocks that are known."""
    start_write: Callable[[Write], None]
    start_read: Callable[[Read], None]


class _Outcome:
    """Of a transaction, to be told once it is committed."""

    def __init__(self) -> None:
        self.gone: list[int] = []
        self.sealed: list[tuple[Write, str]] = []
        """And why it is not ok."""
        self.seen: list[int] = []
        """Blocks that others see from now on."""
        self.placed: list[Write] = []
        self.failed: list[tuple[Write, str]] = []
        self.deleted: list[tuple[Deletion, int]] = []
        self.later: list[Deletion] = []
        self.erased: list[Hole] = []
        self.taken: list[Write] = []
        """Of those that wait."""
        self.back: list[Write] = []
        """Of those, what waits on."""
        self.is_short = False
        """Room was made for what waits."""


class Session:
    """From one opening of the index to its loss. All of one thread; every method may raise OSError, sqlite3.Error and
    `Damaged`."""

    def __init__(self, setting: Setting) -> None:
        self._at = setting
        self._folder = setting.folder
        setting.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._index = Index(setting.folder, 2 * setting.limits.slow_seconds)
        self.generation = self._index.generation
        self._index.on_progress(setting.clocks.begin)
        self._loader = Loader(setting.seals, setting.clocks.begin)
        self._segments: dict[int, Segment] = {}
        self._names: dict[int, str] = {}
        self._named: dict[bytes, int] = {}
        """Ids of namespaces by their roots, within a transaction: others may delete them."""
        self._writing: dict[int, Write] = {}
        """Reserved and not settled, by number."""
        self._unseen: dict[int, Write] = {}
        """Of which this rank's part is there; others', or those of the block before it, may not be."""
        self._sequence = 0
        self._version = -1
        self._is_behind = False
        """Of blocks that others began this store wrote the last part."""
        self._due: dict[str, float] = {}
        self._early = 0
        """Parts that wait for rank 0 to name their blocks,"""
        self._early_version = 0
        """and the last index that had none of them."""
        self._wrote = False
        try:
            home = setting.seals.fingerprint
            self._writer = Writer(setting.files, setting.folder, home, setting.limits.segment_bytes)
            with self._index.transaction():
                self._index.repair()
                self._fingerprint = self._index.fingerprint(home)
                self._index.use(self._fingerprint)
        except BaseException:
            self._index.close()
            raise

    def is_lost(self) -> bool:
        """The folder vanished, or another process began the index anew."""
        try:
            return max(Index.generations(self._folder), default=0) != self.generation
        except FileNotFoundError:
            return True

    @property
    def is_writing(self) -> bool:
        return bool(self._writing)

    @property
    def is_hurried(self) -> bool:
        """It waits for others, or has more to do."""
        return bool(self._unseen) or self._at.inbox.is_hurried

    def turn(self) -> bool:
        """Whether anything was written."""
        self._wrote = False
        self._read_others()
        for _ in range(_COMMITS):
            if not self._commit():
                break
        self._keep_up()
        return self._wrote

    def lose(self) -> dict[int, Write]:
        """Close without a word to the folder. Returns what is under way."""
        for task in self._unseen.values():
            self._at.ledger.end(task.job, "gone")
        with contextlib.suppress(sqlite3.Error):
            self._index.close()
        return self._writing

    def release(self) -> None:
        """After `lose`, once nothing is under way: others may take what was not finished."""
        with contextlib.suppress(OSError):
            self._writer.release()

    def end(self) -> None:
        """Leave nothing but blocks."""
        with self._index.transaction():
            self._index.touch(self._at.inbox.take_values())
            self._index.bury(self._writer.name)
        self._at.space.free(self._index)
        self._writer.end()
        self._index.close()

    # What others did

    def _read_others(self) -> None:
        index, at = self._index, self._at
        version = index.changed()
        if version != self._version or self._is_behind:
            with index.reading():
                sequence = index.sequence()
                removed = index.removals(self._sequence) if self._version >= 0 else None
                rows = index.rows(self._fingerprint, at.rank, self._sequence if removed is not None else -1)
                self._segments = {id: x for id, x in index.segments().items() if is_segment(x.path)}
                self._names.update(self._loader.names(index.namespaces(max(self._names, default=0))))
            if removed is None:  # all anew: what is not there any more is gone
                removed = list(at.places.keys() - {row[0] for row in rows})
            self._forget(removed)
            new = [row for row in rows if row[0] not in at.places]
            blocks, bad = self._loader.take(new, self._names, at.places, self._segments)
            self._version, self._sequence, self._is_behind = version, sequence, False
            self._add(blocks)
            if bad:
                at.inbox.delete(bad)
        while at.inbox.lookups:
            task = at.inbox.lookups.popleft()
            place = at.places.get(task.job.number)
            if place is None:
                at.ledger.end(task.job, "missing")
            else:
                self.read(task, place)

    def read(self, task: Read, place: Place) -> None:
        """Begin a read of a part whose place is known. Of any thread."""
        segment = self._segments.get(place.segment)
        task.place = place
        if segment is None:
            self._at.ledger.end(task.job, "missing")
        elif not task.fits():
            self._at.ledger.end(task.job, "shape")
        else:
            task.file, task.salt = self._file(segment)
            self._at.start_read(task)

    def _file(self, segment: Segment) -> tuple[Path, bytes]:
        return self._folder / segment.path, segment.salt + segment.path.encode()

    def _add(self, blocks: list[Block]) -> None:
        if others := [x for x in blocks if not self._end_unseen(x.number)]:
            self._at.ledger.change(added=others)

    def _forget(self, numbers: Collection[int]) -> None:
        for number in list(self._unseen.keys() & set(numbers)):
            self._at.ledger.end(self._unseen.pop(number).job, "deleted")
        if gone := [x for x in numbers if self._at.places.pop(x, None) is not None]:
            self._at.ledger.change(removed=gone)

    # What it changes

    def _commit(self) -> bool:
        """One transaction: what was written is sealed, what is to go is deleted, what waits is reserved; if there is no
        room, blocks go. Then their bytes are freed. Returns whether there is more to be done at once."""
        inbox, limits = self._at.inbox, self._at.limits
        settled, deletions = list(inbox.settled), list(inbox.deletions)
        touches = inbox.take_values() if self._is_due("touch", limits.touch_seconds) else {}
        reserves = len(inbox.writes) > self._early or self._early > 0 and self._looks_again()
        if not (settled or deletions or touches or reserves):
            return False
        outcome = _Outcome()
        self._named.clear()
        try:
            with self._index.transaction():
                for task in settled:
                    self._seal(task, outcome)
                for deletion in deletions:
                    self._delete(deletion, outcome)
                self._index.touch(touches)
                if reserves:
                    self._at.space.look(self._index)
                    self._reserve(outcome)
        except BaseException:
            self._writer.forget_segment()  # it may be unknown now
            inbox.writes.extendleft(reversed(outcome.taken))
            inbox.put_back(touches)
            raise
        for _ in settled:
            self._writing.pop(inbox.settled.popleft().job.number, None)
        for _ in deletions:
            inbox.deletions.popleft()
        self._tell(outcome)
        return outcome.is_short or bool(inbox.settled)

    def _looks_again(self) -> bool:
        """For blocks that rank 0 was to name: somebody changed the index, or it is time to give up."""
        return self._index.changed() != self._early_version or self._is_due("early", 1.0)

    def _tell(self, outcome: _Outcome) -> None:
        at = self._at
        at.inbox.writes.extendleft(reversed(outcome.back))
        at.inbox.deletions.extend(outcome.later)
        for task, why in outcome.sealed:
            if why or task.block is None:
                at.ledger.end(task.job, why)
            else:
                self._unseen[task.job.number] = task
            if not why:
                self._wrote = True
        ended = [self._end_unseen(x) for x in outcome.seen]
        self._is_behind |= not all(ended)
        self._forget(outcome.gone)
        for task, why in outcome.failed:
            at.ledger.end(task.job, why)
        for task in outcome.placed:
            self._writing[task.job.number] = task
            at.start_write(task)
        why = "its bytes may still be there"
        try:
            at.space.erase(outcome.erased)
            if outcome.gone or outcome.sealed or outcome.deleted:
                at.space.free(self._index)
            why = ""
        finally:
            for deletion, nbytes in outcome.deleted:
                if deletion.job is not None:
                    deletion.job.nbytes += nbytes
                    if deletion not in outcome.later:
                        at.ledger.end(deletion.job, why)

    def _end_unseen(self, number: int) -> bool:
        """A block of ours can be seen. False if it is not ours, or has ended."""
        task = self._unseen.pop(number, None)
        if task is None or task.block is None:
            return False
        self._at.places[number] = task.place
        if not self._at.ledger.end(task.job):  # given up, as it was committed
            self._at.ledger.change(added=[Block(number, *task.block, nbytes=task.place.nbytes)])
        return True

    def _seal(self, task: Write, outcome: _Outcome) -> None:
        number, rank = task.job.number, self._at.rank
        if task.error is not None or task.given_up:
            self._index.abandon(number, rank)
            outcome.gone.extend(self._index.delete(self._index.subtree([number])).numbers)
            why = "given up" if task.error is None or isinstance(task.error, GivenUp) else str(task.error)
            if isinstance(task.error, OSError) and trouble(task.error)[0] is StoreState.FULL:
                self._at.space.lower(aligned(task.place.nbytes))
            outcome.sealed.append((task, why))
            return
        seen = self._index.seal(number, rank, task.place.seal)
        task.deadline = time.monotonic() + self._at.limits.ranks_seconds
        outcome.sealed.append((task, "deleted" if seen is None else ""))
        outcome.seen.extend(seen or ())

    def _delete(self, deletion: Deletion, outcome: _Outcome) -> None:
        """Ends once none of its blocks is being written either."""
        index, at = self._index, self._at
        if not isinstance(deletion.what, str):
            freed = index.delete(index.subtree(deletion.what))
            outcome.gone.extend({*freed.numbers, *deletion.what})  # also what a damaged index cannot find any more
            outcome.deleted.append((deletion, freed.nbytes))
            return
        nbytes, left = 0, _DELETED
        names = self._matching(deletion.what)
        for id in names:
            numbers = index.of_namespace(id, left)
            left -= len(numbers)
            if not at.files.holes:
                outcome.erased.extend(index.extents(numbers))
            freed = index.delete(numbers)
            outcome.gone.extend(freed.numbers)
            nbytes += freed.nbytes
        outcome.deleted.append((deletion, nbytes))
        under_way = [x for x in self._writing.values() if x.is_of(deletion.what)]
        for task in under_way:
            task.given_up = True
        outcome.failed.extend((x, "deleted") for x in at.inbox.writes if x.is_of(deletion.what))
        for task, _ in outcome.failed:
            task.given_up = True
        if under_way or not left:
            outcome.later.append(deletion)
        else:
            index.forget_namespaces(names)

    def _matching(self, prefix: str) -> list[int]:
        """Ids of namespaces; those under another key, or that cannot be read, are among them."""
        seals, found = self._at.seals, []
        for id, digest, name, key_name in self._index.namespaces():
            try:
                shown = seals.show(name, digest) if key_name == seals.key_name else name if not key_name else None
                if shown is None or shown.decode().startswith(prefix):
                    found.append(id)
            except (BadSeal, UnicodeDecodeError, TypeError):
                found.append(id)
        return found

    def _reserve(self, outcome: _Outcome) -> None:
        """Places for what waits, as far as there is room; if there is not enough, make some."""
        inbox, space = self._at.inbox, self._at.space
        flying = sum(aligned(x.place.nbytes) for x in self._writing.values())
        early = 0
        most = min(self._at.limits.batch_bytes, space.limit // 4)
        while inbox.writes and flying < max(1, most):
            task = inbox.writes.popleft()
            outcome.taken.append(task)
            if task.given_up:
                outcome.failed.append((task, "given up"))
                continue
            path, why = self._path(task)
            if path is None:
                if why:
                    outcome.failed.append((task, why))
                else:
                    outcome.back.append(task)
                    early += 1
                continue
            extent = aligned(task.job.nbytes + self._at.seals.overhead)
            if space.used + extent > space.limit:
                self._make_room(task, extent, outcome)
                break
            self._place(task, path, extent)
            outcome.placed.append(task)
            space.used += extent
            flying += extent
        self._early, self._early_version = early, self._index.changed()

    def _path(self, task: Write) -> tuple[bytes | None, str]:
        """The digest of a block's path; or why there is none: nothing if there may be one soon."""
        index, block = self._index, task.block
        if block is None:
            path = index.path(task.job.number, self._fingerprint)
            return path, "" if path or time.monotonic() < task.deadline else "missing"
        seals = self._at.seals
        before = seals.root(block.namespace) if block.parent is None else index.path(block.parent, self._fingerprint)
        if before is None:
            return None, "the block before it is gone"
        return seals.path(before, block.kind, block.start, block.ids), ""

    def _place(self, task: Write, path: bytes, extent: int) -> None:
        index, at, number, block = self._index, self._at, task.job.number, task.block
        segment, offset = self._writer.allot(index, extent)
        self._segments[segment.id] = segment
        if block is not None:
            root = at.seals.root(block.namespace)
            namespace = self._named.get(root)
            if namespace is None:
                hidden = at.seals.hide(block.namespace.encode(), root)
                namespace = index.namespace(self._fingerprint, root, hidden, at.seals.key_name)
                self._named[root] = namespace
            row = (number, self._fingerprint, block.kind, namespace, block.parent, block.start, path, block.value)
            index.reserve(*row, at.seals.hide(block.ids, path), at.ranks)
        index.reserve_part(number, at.rank, segment.id, offset, extent, task.job.nbytes)
        task.place = Place(segment.id, offset, task.job.nbytes, b"", path)
        task.file, task.salt = self._file(segment)

    def _make_room(self, task: Write, extent: int, outcome: _Outcome) -> None:
        """For `task` and some that follow it, or fail it."""
        space, waiting = self._at.space, [task, *self._at.inbox.writes]
        if extent <= space.limit:
            wanted, below = 0, float("-inf")
            for x in waiting:
                wanted += aligned(x.job.nbytes + self._at.seals.overhead)
                below = max(below, float("inf") if x.block is None else x.block.value)
                if wanted > self._at.limits.batch_bytes // 4:
                    break
            wanted = max(extent, min(wanted, space.limit // 8))
            gone = space.make(self._index, wanted, below, self._writer.segment, self._fingerprint).numbers
            outcome.gone.extend(gone)
            outcome.is_short = bool(gone) or self._writer.close_segment(self._index) and not self._at.files.holes
        if outcome.is_short or self._writing and extent <= space.limit:  # what is being written can go later
            outcome.back.append(task)
        elif space.is_floor and extent > space.limit:
            raise OSError(errno.ENOSPC, "the file system has no more free than its floor")
        else:
            outcome.failed.append((task, "no room"))

    # Now and then

    def _keep_up(self) -> None:
        at, index, now = self._at, self._index, time.monotonic()
        late = [x for x in self._unseen.values() if now > x.deadline]
        if late:
            at.inbox.delete([x.job.number for x in late])
        for task in late:
            del self._unseen[task.job.number]
            at.ledger.end(task.job, "other ranks did not write it")
        if self._is_due("upkeep", at.limits.upkeep_seconds):
            reclaim(at.files, self._folder, index, self._writer.name)
            old = time.time() - at.limits.forget_seconds
            with index.transaction():
                index.use(self._fingerprint)
                index.trim_removals()
                for fingerprint in set(index.unused(old)) - {self._fingerprint}:
                    index.delete(index.of_fingerprint(fingerprint, _DELETED))
                homes = index.forget_fingerprints(old)
            for home in homes:
                with contextlib.suppress(OSError):
                    (self._folder / home).rmdir()
        if self._is_due("look", at.limits.tick_seconds):
            at.space.look(index)
            if at.space.used > at.space.limit:
                with index.transaction():
                    at.space.look(index)
                    gone = at.space.make(index, 0, float("inf"), self._writer.segment, self._fingerprint).numbers
                self._forget(gone)
            at.space.free(index)

    def _is_due(self, what: str, seconds: float) -> bool:
        """Whether it was not done for so long; then it is now."""
        now = time.monotonic()
        if now < self._due.get(what, 0.0):
            return False
        self._due[what] = now + seconds
        return True
