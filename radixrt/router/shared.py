"""What several front ends have in common: values by tenant and key, which the router keeps and does not look into."""

from __future__ import annotations

from collections import OrderedDict

ENTRY_BYTES = 256
"""That an entry costs beside its key and value."""


class _Values:
    """Of one tenant, the latest used last."""

    def __init__(self) -> None:
        self.entries: OrderedDict[bytes, bytes] = OrderedDict()
        self.size = 0

    def pop(self, key: bytes) -> int:
        """Bytes freed; 0 if it is not there."""
        value = self.entries.pop(key, None)
        freed = 0 if value is None else len(key) + len(value) + ENTRY_BYTES
        self.size -= freed
        return freed


class SharedMemory:
    """At most `max_bytes`; beyond it the least recently used values go, of the tenant that has most."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._tenants: dict[str, _Values] = {}
        self._size = 0

    @property
    def num_bytes(self) -> int:
        return self._size

    def get(self, tenant: str, key: bytes) -> bytes | None:
        found = self._tenants.get(tenant)
        if found is None or key not in found.entries:
            return None
        found.entries.move_to_end(key)
        return found.entries[key]

    def put(self, tenant: str, key: bytes, value: bytes | None) -> None:
        """Keep a value in place of the one before; None: forget that one."""
        values = self._tenants.setdefault(tenant, _Values())
        self._size -= values.pop(key)
        if value is not None:
            values.entries[key] = value
            size = len(key) + len(value) + ENTRY_BYTES
            values.size += size
            self._size += size
        while self._size > self._max_bytes:
            most = max(self._tenants.values(), key=lambda one: one.size)
            self._size -= most.pop(next(iter(most.entries)))
        if not values.entries:
            del self._tenants[tenant]
