"""Settings of Python's cyclic garbage collector and of the C library's heap for serving processes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Options of `mallopt`, from glibc's malloc.h."""
MAX_HEAP_BLOCK_BYTES = 32 << 20
"""Blocks of up to this many bytes are allocated on the heap, larger ones by mmap. This is the most that glibc
allows."""
YOUNG_OBJECTS = 20_000
"""The number of new objects that starts a collection of the youngest generation. A request in flight has some hundred
objects without cycles; with Python's default of 700, they would be traversed again and again for nothing."""


def settle() -> None:
    """Exclude all objects that exist now from all later collections. To be called once, when everything is loaded.

    A full collection traverses every object. Modules, the tokenizer and tables are some 100,000 objects: each time, all
    requests would wait for a tenth of a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    keep_heap()


def keep_heap() -> None:
    """Keep up to twice MAX_HEAP_BLOCK_BYTES of free memory at the end of the heap for the next step or request. By
    default glibc returns it to the system, so that it has to be faulted in again, until it has freed a mapped block of
    that size. Does nothing with other C libraries."""
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, MAX_HEAP_BLOCK_BYTES)
        mallopt(M_TRIM_THRESHOLD, 2 * MAX_HEAP_BLOCK_BYTES)


@contextmanager
def held() -> Iterator[None]:
    """Collect garbage now, but not within the context. For the capture of CUDA graphs: a capture fails if the graph of
    a closed runner is destroyed meanwhile, which a collection, at any moment, could do."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
