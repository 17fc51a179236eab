"""What the store asks of the file system; tests put faults here.

Writes and reads go around the page cache where the file system allows (O_DIRECT): they cost no copy in the kernel, push
nothing out of memory, and leave no dirty pages that others wait for.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from pathlib import Path

ALIGNMENT = 4096
"""Bytes to which offsets and lengths in segments are rounded: what direct I/O and holes ask for."""
_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02
_ZEROS = 1 << 20


def aligned(nbytes: int) -> int:
    """`nbytes`, rounded up."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Files:
    """Of one store. Every method but `direct` may raise OSError, and may hang."""

    def __init__(self) -> None:
        self.direct = True
        """Until the file system refuses."""
        self.holes = True
        """Whether parts of files can be freed: until the file system refuses."""
        self._libc = ctypes.CDLL(None, use_errno=True)

    def write(self, path: Path, offset: int, data: memoryview) -> None:
        """All of `data`, of a page-aligned buffer, at `offset`; both aligned. Makes the file if it is not there."""
        fd = self._open(path, os.O_WRONLY | os.O_CREAT)
        try:
            while data:
                done = self._retried(os.pwrite, fd, data, offset)
                data, offset = data[done:], offset + done
        finally:
            os.close(fd)

    def read(self, path: Path, offset: int, data: memoryview) -> int:
        """Fill `data` from `offset`, both aligned. Returns the bytes that there are."""
        fd = self._open(path, os.O_RDONLY)
        try:
            total = 0
            while total < len(data):
                done = self._retried(os.preadv, fd, [data[total:]], offset + total)
                total += done
                if done == 0 or done % ALIGNMENT:
                    break
            return total
        finally:
            os.close(fd)

    def punch(self, path: Path, extents: list[tuple[int, int]]) -> bool:
        """Free (offset, bytes) of a file. False if this file system cannot. A file that is not there has none."""
        if not self.holes:
            return False
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            for offset, nbytes in extents:
                args = ctypes.c_int(fd), ctypes.c_int(_KEEP_SIZE_PUNCH_HOLE)
                if self._libc.fallocate(*args, ctypes.c_int64(offset), ctypes.c_int64(nbytes)):
                    code = ctypes.get_errno()
                    if code in (errno.EOPNOTSUPP, errno.ENOSYS):
                        self.holes = False
                        return False
                    raise OSError(code, os.strerror(code), str(path))
        finally:
            os.close(fd)
        return True

    def erase(self, path: Path, extents: list[tuple[int, int]]) -> None:
        """Write zeros over (offset, bytes): where they cannot be freed, they cannot be read either."""
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            for offset, nbytes in extents:
                for at in range(0, nbytes, _ZEROS):
                    os.pwrite(fd, bytes(min(_ZEROS, nbytes - at)), offset + at)
        finally:
            os.close(fd)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def free(self, folder: Path) -> tuple[int, int]:
        """(free, all) bytes of the file system."""
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

    def lock(self, path: Path) -> int:
        """Make a file that is locked for as long as the descriptor returned is open, at the latest until the process
        ends. Nobody sees it unlocked."""
        hidden = path.with_suffix(".new")
        fd = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(hidden, path)
        return fd

    def take_dead(self, path: Path) -> int | None:
        """The locked descriptor of a lock file whose process is gone; None if it lives, or the file is not there."""
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return None
        return fd

    def _open(self, path: Path, flags: int) -> int:
        flags |= os.O_CLOEXEC
        if self.direct:
            try:
                return os.open(path, flags | os.O_DIRECT, 0o600)
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise
                self.direct = False
        return os.open(path, flags, 0o600)

    def _retried(self, call: object, fd: int, data: object, offset: int) -> int:
        """One call of pwrite or preadv; again through the page cache if it is refused only now."""
        try:
            return call(fd, data, offset)  # type: ignore[operator]
        except OSError as e:
            if e.errno != errno.EINVAL or not self.direct:
                raise
        self.direct = False
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        return call(fd, data, offset)  # type: ignore[operator]


class Buffer:
    """Page-aligned memory of a thread, as large as its largest block so far; very large ones are given back."""

    KEPT_BYTES = 16 << 20

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, ALIGNMENT)

    def view(self, nbytes: int) -> memoryview:
        if len(self._memory) < nbytes or nbytes <= self.KEPT_BYTES < len(self._memory):
            self._memory = mmap.mmap(-1, max(ALIGNMENT, nbytes))
        return memoryview(self._memory)[:nbytes]
