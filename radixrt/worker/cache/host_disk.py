"""A store of KV blocks whose rows are the slots of host memory (see `cache.disk_figures.Disk`). No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from radixrt.messages.namespace import Namespace
from radixrt.worker.disk import Block, Changes, DiskStore, Job, NewBlock, StoreState

Adapter = tuple[str, int]
"""(name, version) of a LoRA adapter."""


class HostDisk:
    """`store`, of the rows of `pages`, uint8[slots, bytes], and of `states`, uint8[slots - 1, bytes], whose slot 0 has
    no row. `settled`: see `Disk`; by default copies have ended when they are made.

    An adapter's namespace has the number of its version, which counts from a process' start. On disk it has an identity
    of its content instead: `adapters`, of those that are loaded."""

    def __init__(
        self,
        store: DiskStore,
        pages: np.ndarray,
        states: np.ndarray | None = None,
        settled: Callable[[], Callable[[], bool]] | None = None,
        adapters: Mapping[Adapter, str] | None = None,
    ) -> None:
        self.store = store
        self.page_bytes = pages.shape[1]
        self.state_bytes = 0 if states is None else states.shape[1]
        self._pages = pages
        self._states = states
        self._settled = settled
        self._adapters: dict[Adapter, str] = dict(adapters or {})
        self._others: list[Block] = []
        """Those of adapters that are not loaded."""
        self._again: list[Block] = []
        """Those of an adapter that is loaded now."""

    # ------------------------------------------------------------ adapters

    def keeps(self, namespace: str) -> bool:
        """Whether what is of a namespace can be told from what is not, after a restart."""
        return self._stored(namespace) is not None

    def loaded(self, adapter: Adapter, identity: str) -> None:
        """An adapter is loaded: its blocks are among those that are added next."""
        self._adapters[adapter] = identity
        there = _IDENTITY + identity
        self._again += [block for block in self._others if block.namespace.split("\n", 3)[2:3] == [there]]
        self._others = [block for block in self._others if block.namespace.split("\n", 3)[2:3] != [there]]

    def unloaded(self, adapter: Adapter) -> None:
        """No request will have it any more."""
        self._adapters.pop(adapter, None)

    def _stored(self, namespace: str) -> str | None:
        """The name of a namespace on disk; None: nothing of it is kept there."""
        tenant, model, version, salt = (*namespace.split("\n", 3), "", "", "")[:4]
        adapter = Namespace.of(namespace).model, int(version or 0)
        if adapter in self._adapters:
            return f"{tenant}\n{model}\n{_IDENTITY}{self._adapters[adapter]}\n{salt}"
        return None if version else namespace

    def _here(self, blocks: list[Block]) -> list[Block]:
        """Blocks with the names that their namespaces have here; those that have none wait."""
        names = {identity: adapter for adapter, identity in self._adapters.items()}
        found = []
        for block in blocks:
            parts = block.namespace.split("\n", 3)
            if len(parts) < 4 or not parts[2]:
                if (Namespace.of(block.namespace).model, 0) not in self._adapters:  # else of the time when it was none
                    found.append(block)
                continue
            adapter = names.get(parts[2].removeprefix(_IDENTITY)) if parts[2].startswith(_IDENTITY) else None
            if adapter is None or adapter[0] != Namespace.of("\n".join(parts[:2])).model:
                self._others.append(block)
                continue
            version = str(adapter[1] or "")
            found.append(block._replace(namespace="\n".join([*parts[:2], version, parts[3]])))
        return found

    # ------------------------------------------------------------ the store

    @property
    def serves(self) -> bool:
        return self.store.state is StoreState.OK

    @property
    def backlog(self) -> int:
        return self.store.backlog

    @property
    def used(self) -> int:
        return self.store.used

    def rates(self) -> tuple[float, float]:
        return self.store.rates()

    def blocks(self) -> list[Block]:
        return self._here(self.store.blocks())

    def poll(self) -> Changes:
        changes = self.store.poll()
        if not changes.added and not self._again:
            return changes
        again, self._again = self._again, []
        return changes._replace(added=[*self._here(again), *self._here(changes.added)])

    def write(self, block: NewBlock, slots: np.ndarray) -> Job:
        rows, slots = self._rows(block.kind, slots)
        name = self._stored(block.namespace)
        if name is None:  # an adapter that was unloaded meanwhile: on disk nobody finds it
            tenant, model, _, salt = block.namespace.split("\n", 3)
            name = f"{tenant}\n{model}\n{_IDENTITY}\n{salt}"
        return self.store.write(block._replace(namespace=name), rows, slots)

    def read(self, number: int, kind: str, slots: np.ndarray, first: int = 0) -> Job:
        rows, slots = self._rows(kind, slots)
        return self.store.read(number, rows, slots, first)

    def write_part(self, number: int, kind: str, slots: np.ndarray) -> None:
        """Write a rank's part of a block (see `parallel.ranked_disk`)."""
        rows, slots = self._rows(kind, slots)
        self.store.write_part(number, rows, slots)

    def _rows(self, kind: str, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if kind == "kv":
            return self._pages, slots
        assert self._states is not None
        return self._states, slots - 1

    def touch(self, numbers: list[int]) -> None:
        self.store.touch(numbers)

    def delete(self, numbers: list[int]) -> None:
        if numbers:
            self.store.delete(numbers)

    def delete_namespaces(self, prefix: str) -> None:
        self.store.delete_namespaces(prefix)

    def settled(self) -> Callable[[], bool]:
        return _at_once if self._settled is None else self._settled()

    def close(self) -> None:
        self.store.close()


_IDENTITY = "#"
"""With which the identity of an adapter begins, in the place of its version."""


def _at_once() -> bool:
    return True
