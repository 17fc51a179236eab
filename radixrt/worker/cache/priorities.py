"""Retention by priority: paths that a client has asked to be kept (`retain`) go after all others when pages are needed,
those of lower priority first, until their time is over. Then they count as any other.

    evictable: by the eviction policy  |  priority 0 ... 100  |  pins, running requests: not evicted
               first                      last

Unlike a pin it promises nothing: its pages count as evictable, and admit requests. It is a lease that is loosened when
nothing else can be evicted, and fastened again around what is left of its path. So the eviction policy knows nothing of
it, and the same holds for each tier with a tree.
"""

from __future__ import annotations

from dataclasses import replace

from radixrt.messages import TOKEN_BYTES
from radixrt.tree import Lease
from radixrt.worker.cache.pins import Key, Pin, Pins, ends_along


class Priorities(Pins):
    """The retained paths of one tree. Bounds and times are as those of pins; of a tenant's paths that exceed its share,
    those of the lowest priority go."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._loose: dict[Key, Pin] = {}
        """Those whose leases were released to evict some of their tokens."""

    @property
    def leases(self) -> list[Lease]:
        """Leases of all paths."""
        return [pin.lease for pin in self._pins.values()]

    def loosen(self) -> bool:
        """Let the path of the lowest priority be evicted, of several the least recently used; False if there is none.
        `fasten` is to be called after the eviction."""
        key = min(self._pins, key=lambda key: self._pins[key].priority, default=None)
        if key is not None:
            self._loose[key] = self._pins[key]
            self._release(key)
        return key is not None

    def loosen_along(self, namespace: str, ids: bytes) -> None:
        """Let those be evicted of which a path is a prefix, or that are one of it. `fasten` is to be called after the
        eviction."""
        for key in [key for key in self._pins if key[0] == namespace and ends_along(key[1], ids, 0)]:
            self._loose[key] = self._pins[key]
            self._release(key)

    def fasten(self) -> list[tuple[int, Pin]]:
        """Retain what is left of the paths that were loosened. Returns (name, former pin) of those that have lost
        something."""
        lost = []
        loose, self._loose = self._loose, {}
        for (namespace, ids, name), pin in loose.items():
            lease = self._tree.lease(self._tree.match(namespace, ids))
            left = ids[: lease.length * TOKEN_BYTES]
            if len(left) < len(ids):
                lost.append((name, pin))
            if not left or (namespace, left, name) in self._pins:
                lease.release()
            else:
                self._hold((namespace, left, name), replace(pin, ids=left, lease=lease))
        return lost

    def named(self, name: int) -> bytes:
        """The longest path of that name, int32 bytes; empty if there is none."""
        return max((ids for _, ids, of in self._pins if of == name), key=len, default=b"")

    def release_oldest(self) -> bool:
        """Release the path of the lowest priority, of the tenant that holds most; False if there is none."""
        tenant = max(self._paths, key=self.tokens, default=None)
        if tenant is None:
            return False
        self._release(self._going(self._of(tenant))[0])
        return True

    def _going(self, keys: list[Key]) -> list[Key]:
        return sorted(keys, key=lambda key: self._pins[key].priority)
