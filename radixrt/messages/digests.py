"""Digests of prefixes, by which a worker tells the router after which of them it has a checkpoint of the recurrent
state (see Saved). Not imported by the package itself: clients do not need numpy."""

from __future__ import annotations

import functools
from hashlib import blake2b

import numpy as np

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_powers = np.ones(0, dtype=np.uint64)


def prefix_digests(namespace: str, ids: bytes | memoryview) -> np.ndarray:
    """uint64[N + 1]: by length, a digest of the namespace and of that many of the N `ids` (int32). It serves estimates
    only: whoever looks for two prefixes with the same digest finds them."""
    tokens = np.frombuffer(ids, dtype=np.int32)
    digests = np.empty(len(tokens) + 1, dtype=np.uint64)
    digests[0] = 0
    np.cumsum(_terms(tokens), out=digests[1:])
    digests += _digest(namespace)
    return digests


def prefix_digest(namespace: str, ids: bytes | memoryview) -> int:
    """The last one of `prefix_digests`."""
    tokens = np.frombuffer(ids, dtype=np.int32)
    return (_terms(tokens).sum(dtype=np.uint64) + _digest(namespace)).item()


def _terms(tokens: np.ndarray) -> np.ndarray:
    global _powers
    if len(_powers) < len(tokens):
        _powers = np.cumprod(np.full(2 * len(tokens), _FACTOR, dtype=np.uint64), dtype=np.uint64)
    return (tokens.astype(np.uint64) + np.uint64(1)) * _powers[: len(tokens)]


@functools.lru_cache(maxsize=1024)
def _digest(namespace: str) -> np.ndarray:
    """uint64[1]: of an array, as sums of scalars warn when they overflow."""
    return np.frombuffer(blake2b(namespace.encode(), digest_size=8).digest(), dtype=np.uint64)
