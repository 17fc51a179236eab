"""How Python's cyclic garbage collector, and the C library's heap, run in a process that serves."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""
MOST_ON_HEAP = 32 << 20
"""Bytes of a block that is not mapped on its own: glibc takes no more."""
YOUNG_OBJECTS = 20_000
"""That may be alive, since a collection, before the next one looks at them. Requests in flight are some hundred objects
each and leave no cycles: with Python's default of 700 they are looked at again and again, for nothing."""


def settle() -> None:
    """All that lives now will live as long as the process: leave it out of all collections from now on.

    A full collection looks at every object. Those of the modules, the tokenizer and the tables that a server loads are
    some 100,000: each time all requests would wait for a tenth of a second. Call it once, when all is loaded.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    keep_heap()


def keep_heap() -> None:
    """What a step or a request frees at the end of the heap stays for the next one, up to twice MOST_ON_HEAP: given
    back, as it is at first, it comes again as page faults. glibc does so by itself once it has freed a block as large;
    other C libraries have no such setting."""
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, MOST_ON_HEAP)
        mallopt(M_TRIM_THRESHOLD, 2 * MOST_ON_HEAP)


@contextmanager
def held() -> Iterator[None]:
    """What is garbage goes before the body; what becomes garbage in it goes later. To capture CUDA graphs: one of a
    closed runner's that is collected meanwhile, as cycles are at any moment, breaks the capture."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
