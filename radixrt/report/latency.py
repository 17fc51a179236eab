"""Latencies of sequences as histograms, for Prometheus. Times are in seconds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

FIRST = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
EACH = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
WHOLE = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)


class Histogram:
    """Counts of values by bucket: `counts[i]` of those up to `bounds[i]` and above the bound before; the last of those
    above all bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        """The sum of all values."""

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def quantile(self, share: float) -> float | None:
        """The value that a `share` of the values is below, by interpolation within its bucket; above all bounds the
        last of these. None without values."""
        wanted, below, low = share * sum(self.counts), 0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and below + count >= wanted:
                return low + (bound - low) * (wanted - below) / count
            below, low = below + count, bound
        return low if self.counts[-1] else None

    def buckets(self) -> Iterator[tuple[str, int]]:
        """(upper bound, number of values up to it) as in Prometheus' text format."""
        return zip([*map(str, self.bounds), "+Inf"], accumulate(self.counts), strict=True)


@dataclass(slots=True)
class Latency:
    """Of the sequences of one tenant and model, from their arrival at the router, which has token ids then."""

    first: Histogram = field(default_factory=lambda: Histogram(FIRST))
    """Until the first token."""
    each: Histogram = field(default_factory=lambda: Histogram(EACH))
    """For a token after the first: the mean of each sequence that has ended by itself, or by a limit."""
    tokens: Histogram = field(default_factory=lambda: Histogram(EACH))
    """The same, counted once for each such token."""
    whole: Histogram = field(default_factory=lambda: Histogram(WHOLE))
    """Until the last token of such a sequence."""

    def ended(self, first: float, last: float, tokens: int) -> None:
        """A sequence of so many tokens (at least 1) has ended; `first` and `last` are the times until these arrived."""
        self.whole.add(last)
        if tokens > 1:
            self.each.add((last - first) / (tokens - 1))
            self.tokens.add((last - first) / (tokens - 1), tokens - 1)
