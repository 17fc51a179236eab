"""Shares of right answers, with their intervals."""

from __future__ import annotations

import math
from typing import NamedTuple

Z = 1.959964
"""Of a normal distribution, 95% lies within so many standard deviations."""


class Share(NamedTuple):
    right: int
    items: int

    @property
    def value(self) -> float:
        return self.right / self.items

    def interval(self) -> tuple[float, float]:
        """95%, by Wilson's score: (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n)."""
        n, p = self.items, self.value
        middle, half = p + Z * Z / (2 * n), Z * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
        low, high = (middle - half) / (1 + Z * Z / n), (middle + half) / (1 + Z * Z / n)
        return max(0.0, low), min(1.0, high)

    @property
    def shown(self) -> str:
        """As percentages: "91.0 (86.2 to 94.3)"."""
        low, high = self.interval()
        return f"{100 * self.value:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def sign_test(better: int, worse: int) -> float:
    """McNemar's exact test: how likely at least so uneven a split is, if items flip either way alike. 1 without flips.

    The items that are right in one run and wrong in the other are coin tosses: p = 2 P(X <= min), X ~ B(n, 1/2)."""
    n = better + worse
    tail = sum(math.comb(n, k) for k in range(min(better, worse) + 1)) / 2**n
    return min(1.0, 2 * tail)
