"""What was removed from disk to make room, for a while: whether it was thrown away too early."""

from __future__ import annotations

import time
from collections import OrderedDict

from radixrt.messages.digests import prefix_digests
from radixrt.worker.cache.disk_index import Entry

EARLY_SECONDS = 600.0
"""What is asked for within so long after it was removed was removed too early."""
MAX_GHOSTS = 1024
"""Blocks that are remembered."""


class Ghosts:
    """The last blocks that were removed: by (tokens, digest) of the path to their end, (tokens before it, when)."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[tuple[int, int], tuple[int, float]] = OrderedDict()

    def add(self, chain: list[Entry], path: bytes) -> None:
        """Blocks are gone that follow each other, up to the end of `path`, int32."""
        digests, now = prefix_digests(chain[0].namespace, path), time.monotonic()
        for entry in chain:
            self._blocks[entry.stop, int(digests[entry.stop])] = entry.start, now
        while len(self._blocks) > MAX_GHOSTS:
            self._blocks.popitem(last=False)

    def asked(self, namespace: str, ids: bytes, known: int) -> int:
        """How many tokens of a path, of which `known` are known, were removed too early. Each counts once."""
        since = time.monotonic() - EARLY_SECONDS
        while self._blocks and next(iter(self._blocks.values()))[1] < since:
            self._blocks.popitem(last=False)
        if not self._blocks:
            return 0
        digests = prefix_digests(namespace, ids).tolist()
        found = [key for key in self._blocks if key[0] < len(digests) and digests[key[0]] == key[1]]
        return sum(max(0, stop - max(known, self._blocks.pop((stop, digest))[0])) for stop, digest in found)
