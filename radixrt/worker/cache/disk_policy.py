"""What the disk tier decides, as pure functions of sizes and measured rates: what is read, what is written at once, and
how long a request waits for what it needs."""

from __future__ import annotations

from radixrt.worker.prefill_cost import PrefillCost

BLOCK_BYTES = 4 << 20
"""A block has at most so many bytes, in whole pages: enough to be read at the rate of large reads, and little enough
that few pages are read in vain where a request's path leaves a block."""
READ_RATE = 1e9
"""Bytes a second that a disk is taken to give until its rate is known: some blocks have to be read to know it."""
READ_SECONDS = 0.002
"""What a read takes beside its bytes: the time to begin it, and a step that comes between."""
PATIENCE = 1.0
"""A request waits for its reads at most so many times as long as it would take to compute what they bring, ..."""
MIN_WAIT, MAX_WAIT = 0.25, 30.0
"""... but at least and at most so many seconds."""
STAGING_SHARE = 4
"""What is on its way to the disk has at most one of so many slots of host memory."""
BACKLOG_BYTES = 256 << 20
"""Beyond so many bytes on their way to the disk, nothing more is begun: what host memory loses meanwhile is lost."""


def pages_in_block(page_bytes: int, block_bytes: int = BLOCK_BYTES) -> int:
    """How many pages a block has at most."""
    return max(1, block_bytes // max(1, page_bytes))


def read_seconds(nbytes: int, read_rate: float) -> float:
    """READ_SECONDS + bytes / rate: how long reads take of so many bytes, at a rate in bytes a second (0: unknown)."""
    return READ_SECONDS + nbytes / (read_rate or READ_RATE)


def reading_pays(tokens: int, before: int, nbytes: int, cost: PrefillCost, read_rate: float) -> bool:
    """Whether to read `nbytes`, which bring `tokens` tokens that follow `before` others, rather than to compute these:
    if that is faster."""
    return tokens > 0 and read_seconds(nbytes, read_rate) < cost.seconds(tokens, before)


def longest_wait(tokens: int, before: int, cost: PrefillCost) -> float:
    """min(MAX_WAIT, max(MIN_WAIT, PATIENCE * cost)): seconds after which a request computes `tokens` tokens, for which
    reads were begun and which follow `before` others."""
    return min(MAX_WAIT, max(MIN_WAIT, PATIENCE * cost.seconds(tokens, before)))


def writable_pages(total_slots: int, in_flight: int) -> int:
    """How many more pages may be on their way to the disk, of `total_slots` slots of host memory."""
    return max(0, max(1, total_slots // STAGING_SHARE) - in_flight)
