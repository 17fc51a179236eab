"""The segment files that a store appends to, and what is left of stores that are gone."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from pathlib import Path

from radixrt.worker.disk.files import Files
from radixrt.worker.disk.index import Index, Segment

_SEGMENT = re.compile(r"fp-[0-9a-f]{32}/([0-9a-f]{10})-[0-9]+\.kv")
_LOCK = re.compile(r"([0-9a-f]{10})\.lock")
_FORGOTTEN_SECONDS = 60


class Writer:
    """Names a store while it is open: its lock and its segments. Of the thread of the index."""

    def __init__(self, files: Files, folder: Path, fingerprint: bytes, segment_bytes: int) -> None:
        self._files = files
        self._folder = folder
        self._home = f"fp-{fingerprint.hex()}"
        self._segment_bytes = segment_bytes
        self.name = secrets.token_hex(5)
        self._count = 0
        self.segment: Segment | None = None
        """To which it appends."""
        self._end = 0
        self._lock = files.lock(folder / f"{self.name}.lock")

    def allot(self, index: Index, extent: int) -> tuple[Segment, int]:
        """(segment, offset) of `extent` bytes. No offset is allotted twice, whatever becomes of the transaction."""
        if self.segment is None or self._end + extent > self._segment_bytes and self._end:
            self.close_segment(index)
            self._count += 1
            path = f"{self._home}/{self.name}-{self._count}.kv"
            self.segment = index.add_segment(path, self.name, secrets.token_bytes(16))
            self._end = 0
            (self._folder / self._home).mkdir(mode=0o700, exist_ok=True)
        offset, self._end = self._end, self._end + extent
        return self.segment, offset

    def close_segment(self, index: Index) -> bool:
        """Append no more to it. Whether there was one."""
        if self.segment is None:
            return False
        index.close_segment(self.segment.id)
        self.segment = None
        return True

    def forget_segment(self) -> None:
        self.segment = None

    def release(self) -> None:
        """Whoever comes next finds it gone."""
        os.close(self._lock)

    def end(self) -> None:
        """Nothing is left to be done after it."""
        self._files.remove(self._folder / f"{self.name}.lock")
        self.release()


def is_segment(path: str) -> bool:
    """Whether an index may name it: only files of ours are ever opened, emptied or removed."""
    return _SEGMENT.fullmatch(path) is not None


def reclaim(files: Files, folder: Path, index: Index, own: str) -> None:
    """Take over what stores left behind whose processes are gone, and remove files that the index does not know."""
    living = {own}
    for name in os.listdir(folder):
        found = _LOCK.fullmatch(name)
        if name.endswith((".new", ".probe")):
            _forget(files, folder / name)
        if found is None or found[1] == own:
            continue
        lock = files.take_dead(folder / name)
        if lock is None:
            living.add(found[1])
            continue
        try:
            with index.transaction():
                index.bury(found[1])
            files.remove(folder / name)
        finally:
            os.close(lock)
    for writer in index.open_writers():
        if writer not in living and not (folder / f"{writer}.lock").exists():
            with index.transaction():
                index.bury(writer)
    _remove_strays(files, folder, index)


def _forget(files: Files, path: Path) -> None:
    """A file that somebody made and could not finish with."""
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > _FORGOTTEN_SECONDS and (lock := files.take_dead(path)) is not None:
            files.remove(path)
            os.close(lock)


def _remove_strays(files: Files, folder: Path, index: Index) -> None:
    there = [
        f"{home}/{name}"
        for home in os.listdir(folder)
        if home.startswith("fp-")
        for name in os.listdir(folder / home)
        if is_segment(f"{home}/{name}")
    ]
    known = {x.path for x in index.segments().values()}  # read after: a segment is in the index before its file is made
    for path in there:
        writer = path.partition("/")[2].partition("-")[0]
        if path not in known and not (folder / f"{writer}.lock").exists():
            files.remove(folder / path)
