"""The LoRA adapters that clients have loaded: they are loaded again after a restart, as the same versions."""

from __future__ import annotations

import msgspec

from radixrt.messages import Adapter
from radixrt.router.persistence.store import PersistentStore

OWNER = "\0adapters"
"""In place of a tenant, none of which has such a name."""
_encode = msgspec.msgpack.Encoder().encode
_adapter = msgspec.msgpack.Decoder(Adapter)


class SavedAdapters:
    def __init__(self, store: PersistentStore) -> None:
        self._store = store

    def keep(self, adapter: Adapter) -> None:
        """An adapter was loaded, or unloaded (path "")."""
        if adapter.path:
            self._store.put(OWNER, adapter.name.encode(), _encode(adapter))
        else:
            self._store.remove(OWNER, adapter.name.encode())

    def read(self) -> list[Adapter]:
        """Those that are loaded. To be called before the event loop runs."""
        found = []
        for value in self._store.values(OWNER):
            try:
                found.append(_adapter.decode(value))
            except msgspec.MsgspecError:
                continue
        return found
