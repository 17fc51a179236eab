"""Page-locked host memory, which the copy engines of a GPU read and write without the help of a processor."""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref

import torch


class PinnedMemory:
    """`size` bytes of page-locked memory. A thread allocates it, since that takes a second for some 4 GB: meanwhile
    weights can be loaded."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size = size
        self._device = device
        self._found: torch.Tensor | Exception = ValueError("not allocated")
        self._thread = threading.Thread(target=self._allocate, name="pinned-memory", daemon=True)
        self._thread.start()

    def wait(self) -> torch.Tensor:
        """The memory, uint8[size]. Raises ValueError if it cannot be had."""
        self._thread.join()
        if isinstance(self._found, Exception):
            raise ValueError(f"{self._size / 1e9:.1f} GB of host memory cannot be page-locked: {self._found}")
        return self._found

    def do_without(self) -> None:
        """After `wait` has failed: let there be none."""
        self._found = torch.empty(0, dtype=torch.uint8)

    def _allocate(self) -> None:
        try:
            self._found = self._locked()
        except Exception as error:
            self._found = error

    def _locked(self) -> torch.Tensor:
        memory = mmap.mmap(-1, self._size)
        with contextlib.suppress(OSError):  # a kernel without huge pages, which are locked faster
            memory.madvise(mmap.MADV_HUGEPAGE)
        locked = torch.frombuffer(memory, dtype=torch.uint8)
        locked.zero_()  # by several threads; locking pages that are there already takes less time
        cuda = torch.cuda.cudart()
        with torch.cuda.device(self._device):
            if error := int(cuda.cudaHostRegister(locked.data_ptr(), self._size, 0)):
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device=self._device)  # takes notice of the error, so that nobody else has to
                raise ValueError(f"CUDA error {error}")
        # Memory that is returned to the system while it is locked could never be locked again.
        weakref.finalize(self, cuda.cudaHostUnregister, locked.data_ptr()).atexit = False
        return locked
