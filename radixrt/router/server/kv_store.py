"""A key-value store that several front ends share, by tenant. The values are opaque to the router."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from radixrt.router.persistence.store import PersistentStore
from radixrt.tokens.quota import Shares

ENTRY_BYTES = 256
"""About what an entry takes beside its key and value."""
MAX_SHORT_BYTES = 32
KIND = b"v"
"""The first byte of the keys of values on disk, among what else is kept of a tenant there."""


class SharedMemory:
    """Holds at most `max_bytes`. Beyond that the least recently used values of the tenant with most bytes are
    dropped. With `store`, values are also kept on disk, where those that memory has no room for stay."""

    def __init__(self, max_bytes: int, store: PersistentStore | None = None) -> None:
        self._max_bytes = max_bytes
        self._tenants: dict[str, OrderedDict[bytes, bytes]] = {}
        """By tenant and key, the last used one last."""
        self._shares = Shares()
        self._store = store

    @property
    def num_bytes(self) -> int:
        return self._shares.total

    def get(self, tenant: str, key: bytes) -> bytes | None:
        """A value in memory."""
        own = self._tenants.get(tenant)
        if own is None or key not in own:
            return None
        own.move_to_end(key)
        return own[key]

    def misses(self, tenant: str, keys: Sequence[bytes]) -> bool:
        """Whether there may be values on disk for keys that have none in memory."""
        return self._store is not None and any(key not in self._tenants.get(tenant, ()) for key in keys)

    async def find(self, tenant: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of keys, in memory and on disk; None for unknown ones."""
        found = {key: self.get(tenant, key) for key in keys}
        if self._store is not None:
            self._store.touch(tenant, [_stored(key) for key, value in found.items() if value is not None])
            if missing := [key for key, value in found.items() if value is None]:
                values = await self._store.get(tenant, [_stored(key) for key in missing])
                for key, value in zip(missing, values, strict=True):
                    if (newer := self.get(tenant, key)) is None and value is not None:
                        self._keep(tenant, key, value)
                    found[key] = newer if newer is not None else value
        return [found[key] for key in keys]

    def put(self, tenant: str, key: bytes, value: bytes | None) -> None:
        """Set the value of a key; None removes it."""
        self._drop(tenant, key)
        if value is not None:
            self._keep(tenant, key, value)
        if self._store is not None and value is not None:
            self._store.put(tenant, _stored(key), value)
        elif self._store is not None:
            self._store.remove(tenant, _stored(key))

    def touch(self, tenant: str, keys: Sequence[bytes]) -> None:
        """Values of these keys were used where they are known already."""
        if (own := self._tenants.get(tenant)) is not None:
            for key in keys:
                if key in own:
                    own.move_to_end(key)
        if self._store is not None:
            self._store.touch(tenant, [_stored(key) for key in keys])

    def forget(self, tenant: str) -> None:
        """Drop all values of a tenant from memory."""
        for key in tuple(self._tenants.get(tenant, ())):
            self._drop(tenant, key)

    def _keep(self, tenant: str, key: bytes, value: bytes) -> None:
        self._tenants.setdefault(tenant, OrderedDict())[key] = value
        self._shares.add(tenant, _size(key, value))
        while self.num_bytes > self._max_bytes:
            most = self._shares.largest()
            self._drop(most, next(iter(self._tenants[most])))

    def _drop(self, tenant: str, key: bytes) -> None:
        own = self._tenants.get(tenant)
        if own is None or (value := own.pop(key, None)) is None:
            return
        self._shares.add(tenant, -_size(key, value))
        if not own:
            del self._tenants[tenant]


class SharedAnswers:
    """The same memory for the sessions of the router itself (`tokens.chat_history.SharedStore`)."""

    def __init__(self, shared: SharedMemory) -> None:
        self._shared = shared

    def share(self, entries: Sequence[tuple[bytes, bytes | None]], tenant: str) -> None:
        for key, value in entries:
            self._shared.put(tenant, key, value)

    def touch(self, keys: Sequence[bytes], tenant: str) -> None:
        self._shared.touch(tenant, keys)

    async def recall(self, keys: Sequence[bytes], tenant: str) -> list[bytes | None]:
        return await self._shared.find(tenant, keys)


def _stored(key: bytes) -> bytes:
    """The key on disk; of a long one, which front ends do not use, a digest."""
    return KIND + (key if len(key) <= MAX_SHORT_BYTES else blake2b(key, digest_size=MAX_SHORT_BYTES + 1).digest())


def _size(key: bytes, value: bytes) -> int:
    return len(key) + len(value) + ENTRY_BYTES
