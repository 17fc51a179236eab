"""Eviction policies: which leaves of a tree go first that nothing leases, on the device and in the tiers below."""

from __future__ import annotations

from collections.abc import Callable

Policy = Callable[[int, int, int, int, int], float]
"""(clock of its last use, length of the leaf, tokens from the root to its end, uses, priority) -> key of a leaf. The
smallest goes first, and of equal ones the least recently used. Uses are the leases that held it. Its priority is minus
the lowest `Request.priority` of the requests that used it: those with the lowest value come first, and go last."""


def lfu(last_use: int, length: int, tokens: int, uses: int, priority: int) -> float:
    """Least frequently used first."""
    return uses


def by_priority(last_use: int, length: int, tokens: int, uses: int, priority: int) -> float:
    """That first which only the least urgent requests have used."""
    return priority


RETURNS = "returns"
POLICIES: dict[str, Policy | None] = {"lru": None, "lfu": lfu, "priority": by_priority, RETURNS: None}
"""By their names in `WorkerConfig.radix_eviction_policy`. None: the tree's own, least recently used first;
RETURNS lets `ReturnOrder` set it."""
