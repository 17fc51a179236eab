"""A key-value store that several front ends share, by tenant. The values are opaque to the router."""

from __future__ import annotations

from collections import OrderedDict

from radixrt.tokens.quota import Shares

ENTRY_BYTES = 256
"""About what an entry takes beside its key and value."""


class SharedMemory:
    """Holds at most `max_bytes`. Beyond that the least recently used values of the tenant with most bytes are
    dropped."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._tenants: dict[str, OrderedDict[bytes, bytes]] = {}
        """By tenant and key, the last used one last."""
        self._shares = Shares()

    @property
    def num_bytes(self) -> int:
        return self._shares.total

    def get(self, tenant: str, key: bytes) -> bytes | None:
        own = self._tenants.get(tenant)
        if own is None or key not in own:
            return None
        own.move_to_end(key)
        return own[key]

    def put(self, tenant: str, key: bytes, value: bytes | None) -> None:
        """Set the value of a key; None removes it."""
        self._drop(tenant, key)
        if value is not None:
            self._tenants.setdefault(tenant, OrderedDict())[key] = value
            self._shares.add(tenant, _size(key, value))
        while self.num_bytes > self._max_bytes:
            most = self._shares.largest()
            self._drop(most, next(iter(self._tenants[most])))

    def delete(self, tenant: str) -> None:
        """Remove all values of a tenant."""
        for key in list(self._tenants.get(tenant, ())):
            self._drop(tenant, key)

    def _drop(self, tenant: str, key: bytes) -> None:
        own = self._tenants.get(tenant)
        if own is None or (value := own.pop(key, None)) is None:
            return
        self._shares.add(tenant, -_size(key, value))
        if not own:
            del self._tenants[tenant]


def _size(key: bytes, value: bytes) -> int:
    return len(key) + len(value) + ENTRY_BYTES
