"""Room: how many bytes a store may take, and what becomes of bytes that nobody needs."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from radixrt.worker.disk.files import Files
from radixrt.worker.disk.index import Freed, Hole, Index, Segment

_FLOOR_SHARE, _FLOOR_BYTES = 20, 10 << 30
_LOOK_SECONDS = 1.0
_CEILING_SECONDS = 600.0
_HOLES = 1024


class Space:
    """Of one folder. `used` and `limit` are as of the last look."""

    def __init__(self, folder: Path, size: int, files: Files, unused_seconds: float, min_free: int | None) -> None:
        self._folder = folder
        self._size = size
        self._files = files
        self._unused_seconds = unused_seconds
        self._min_free = min_free
        self._free = 0
        self._looked = float("-inf")
        self.used = 0
        self.limit = 0
        self._ceiling = float("inf")
        self._ceiling_until = 0.0
        self.is_floor = False
        """The limit is what is free on the file system, not the size."""

    def look(self, index: Index) -> None:
        """Within a transaction. The limit leaves room for the index, its journal and what a file system adds."""
        used, now = index.used(), time.monotonic()
        if now - self._looked > _LOOK_SECONDS:
            free, total = self._files.free(self._folder)
            floor = min(total // _FLOOR_SHARE, _FLOOR_BYTES) if self._min_free is None else self._min_free
            self._free, self._looked = free - floor + used, now
        if now > self._ceiling_until:
            self._ceiling = float("inf")
        own = self._size - self._size // 128 - 2 * index.nbytes()
        self.used, self.limit, self.is_floor = used, max(0, int(min(own, self._free, self._ceiling))), self._free < own

    def lower(self, extent: int) -> None:
        """The file system did not take `extent`, whatever it says is free (a quota): others go before more come."""
        held = self.used - extent
        if held > self._size // 16:  # less is not worth it: it waits until others need less
            self._ceiling, self._ceiling_until = held - held // 64, time.monotonic() + _CEILING_SECONDS

    def make(self, index: Index, nbytes: int, below: float, segment: Segment | None, own: int) -> Freed:
        """Within a transaction: let blocks go, so that there is room for `nbytes` and a bit more. `below`: see
        `Index.evict`. `segment` is being appended to, `own` is the store's fingerprint. Their bytes are free after
        `free`."""
        excess = self.used + nbytes - self.limit
        if excess <= 0:
            return Freed([], 0)
        if not self._files.holes:
            return index.delete(index.least_segment(0 if segment is None else segment.id))
        unused = [x for x in index.unused(time.time() - self._unused_seconds) if x != own]
        return index.evict(excess + min(self._size // 64, 16 * nbytes), below, unused)

    def free(self, index: Index) -> None:
        """Give holes, and files of nothing else, back to the file system. In transactions of its own."""
        while self._files.holes and (holes := index.holes(_HOLES)):
            if not all(self._files.punch(self._folder / path, extents) for path, extents in _by_path(holes) if path):
                break
            with index.transaction():
                index.filled(holes)
        if segments := index.empty_segments():
            for segment in segments:
                self._files.remove(self._folder / segment.path)
            with index.transaction():
                for segment in segments:
                    index.drop_segment(segment.id)
        self.used = index.used()

    def erase(self, holes: list[Hole]) -> None:
        """What may not be read any more, where it cannot be freed."""
        if not self._files.holes:
            for path, extents in _by_path(holes):
                self._files.erase(self._folder / path, extents)


def _by_path(holes: list[Hole]) -> list[tuple[str, list[tuple[int, int]]]]:
    """Extents of each file, neighbours as one."""
    found = []
    for path, group in itertools.groupby(sorted(holes, key=lambda x: (x.path, x.offset)), key=lambda x: x.path):
        extents: list[tuple[int, int]] = []
        for hole in group:
            if extents and sum(extents[-1]) == hole.offset:
                extents[-1] = extents[-1][0], extents[-1][1] + hole.extent
            else:
                extents.append((hole.offset, hole.extent))
        found.append((path, extents))
    return found
