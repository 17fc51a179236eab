"""What workers have evicted lately, so that it can be said when a prefix was, and by what."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from radixrt.messages import TOKEN_BYTES, tenant_of

KEPT = 4096
"""Evictions that are kept, of about 300 bytes each."""


class Eviction(NamedTuple):
    """Tokens [depth, depth + length) of a path were evicted; `first` are the first ids of them, as bytes."""

    at: float
    worker: str
    namespace: str
    depth: int
    length: int
    first: bytes
    tenant: str
    program: str
    """Those of the request that the worker was sent last, for which there may have been no room."""

    def is_of(self, namespace: str, prompt: bytes, low: int, high: int) -> bool:
        """Whether it has taken some of tokens [low, high) of a prompt."""
        return (
            self.depth < high
            and self.depth + self.length > low
            and self.namespace == namespace
            and prompt.startswith(self.first, self.depth * TOKEN_BYTES)
        )


class Evictions:
    """The last of them."""

    def __init__(self) -> None:
        self._kept: deque[Eviction] = deque(maxlen=KEPT)

    def add(self, eviction: Eviction) -> None:
        self._kept.append(eviction)

    def delete(self, tenant: str) -> None:
        """Forget what was evicted of a tenant."""
        kept = [one for one in self._kept if tenant_of(one.namespace) != tenant]
        self._kept.clear()
        self._kept.extend(kept)

    def find(self, namespace: str, prompt: bytes, low: int, high: int, worker: str) -> Eviction | None:
        """The latest that has taken some of tokens [low, high) of a prompt, on this worker if there is one."""
        found = None
        for one in reversed(self._kept):
            if one.is_of(namespace, prompt, low, high):
                if one.worker == worker:
                    return one
                found = found or one
        return found
