"""How Python's cyclic garbage collector runs in a process that serves."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

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
