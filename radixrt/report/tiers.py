"""The rows of a report about where a worker's pages are: on its device, in host memory and on disk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

TIERS = ("tier", "tokens", "GB", "hits", "read", "MB/s", "saved s", "written", "lost", "early")
"""Heads of the columns. Tokens are there now; the others since start: requests for which it was read, tokens read from
it, bytes by second of waiting, seconds that computing them would have taken longer, tokens written to it, tokens that
are gone from it (of disk: before they were written, or to make room), and of these the ones asked for soon after."""


def tiers(row: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row for each tier below the device that a worker has, of its row in the report."""
    if row.get("host_tokens") or row.get("fetched_tokens"):
        host = f"{row['host_tokens']:,}", "", "", f"{row['fetched_tokens']:,}"
        yield "host", *host, "", "", "", "", ""
    if row.get("disk_tokens") or row.get("disk_written_tokens"):
        seconds = row["disk_read_seconds"]
        yield (
            "disk",
            f"{row['disk_tokens']:,}",
            f"{row['disk_bytes'] / 1e9:.2f}",
            f"{row['disk_hits']:,}",
            f"{row['disk_read_tokens']:,}",
            f"{row['disk_read_bytes'] / 1e6 / seconds:,.0f}" if seconds else "-",
            f"{row['disk_saved_seconds']:,.1f}",
            f"{row['disk_written_tokens']:,}",
            f"{row['disk_lost_tokens'] + row['disk_evicted_tokens']:,}",
            f"{row['disk_early_tokens']:,}",
        )
