"""What a store keeps to."""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    """Seconds and bytes."""

    tick_seconds: float = 0.5
    """Between looks at what others did."""
    slow_seconds: float = 5.0
    """A call of the file system that takes longer may hang."""
    retry_seconds: float = 30.0
    """After a failure, until the next attempt."""
    ranks_seconds: float = 30.0
    """A block that not all ranks have written by then is dropped."""
    touch_seconds: float = 2.0
    """Between commits of values."""
    upkeep_seconds: float = 60.0
    """Between looks for stores that are gone."""
    unused_seconds: float = 600.0
    """After which blocks of a fingerprint that nobody uses are evicted before others."""
    forget_seconds: float = 7 * 86400.0
    """After which they are dropped in any case."""
    segment_bytes: int = 256 << 20
    batch_bytes: int = 64 << 20
    """Under way at a time, and reserved by one transaction."""
    backlog_bytes: int = 1 << 30
    """Of writes that have not ended; more are refused."""
    readers: int = 4
    """Threads."""
    writers: int = 2
