"""File systems that fail."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from radixrt.worker.disk.files import Files


class NoHoles(Files):
    """Parts of files cannot be freed."""

    def __init__(self) -> None:
        super().__init__()
        self.holes = False


class Failing(Files):
    """Reads and writes of segments fail with an error number, while there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.read_error = self.write_error = 0

    def write(self, path: Path, offset: int, data: memoryview) -> None:
        if self.write_error:
            raise OSError(self.write_error, os.strerror(self.write_error))
        super().write(path, offset, data)

    def read(self, path: Path, offset: int, data: memoryview) -> int:
        if self.read_error:
            raise OSError(self.read_error, os.strerror(self.read_error))
        return super().read(path, offset, data)


class Hanging(Files):
    """Reads and writes of segments do not return from the system, until `go`."""

    def __init__(self, reads: bool = True, writes: bool = True) -> None:
        super().__init__()
        self.hangs = False
        self._reads = reads
        self._writes = writes
        self._pipe = os.pipe()
        self.hanging = threading.Semaphore(0)

    def go(self) -> None:
        self.hangs = False
        os.close(self._pipe[1])

    def write(self, path: Path, offset: int, data: memoryview) -> None:
        if self.hangs and self._writes:
            self._hang()
        super().write(path, offset, data)

    def read(self, path: Path, offset: int, data: memoryview) -> int:
        if self.hangs and self._reads:
            self._hang()
        return super().read(path, offset, data)

    def _hang(self) -> None:
        self.hanging.release()
        os.read(self._pipe[0], 1)
