"""Waiting for what happens in other threads and processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(condition: Callable[[], T], seconds: float = 60.0) -> T:
    """Wait until `condition()` is true, and return it. `seconds` decide nothing but when a test that fails gives up, so
    they are many: a busy machine may stop a process for long."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)
    return found
