"""A store of KV blocks whose rows are the slots of host memory (see `cache.disk_figures.Disk`). No torch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from radixrt.worker.disk import Block, Changes, DiskStore, Job, NewBlock, StoreState


class HostDisk:
    """`store`, of the rows of `pages`, uint8[slots, bytes], and of `states`, uint8[slots - 1, bytes], whose slot 0 has
    no row. `settled`: see `Disk`; by default copies have ended when they are made."""

    def __init__(
        self,
        store: DiskStore,
        pages: np.ndarray,
        states: np.ndarray | None = None,
        settled: Callable[[], Callable[[], bool]] | None = None,
    ) -> None:
        self.store = store
        self.page_bytes = pages.shape[1]
        self.state_bytes = 0 if states is None else states.shape[1]
        self._pages = pages
        self._states = states
        self._settled = settled

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
        return self.store.blocks()

    def poll(self) -> Changes:
        return self.store.poll()

    def write(self, block: NewBlock, slots: np.ndarray) -> Job:
        rows, slots = self._rows(block.kind, slots)
        return self.store.write(block, rows, slots)

    def read(self, number: int, kind: str, slots: np.ndarray, first: int = 0) -> Job:
        rows, slots = self._rows(kind, slots)
        return self.store.read(number, rows, slots, first)

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

    def settled(self) -> Callable[[], bool]:
        return _at_once if self._settled is None else self._settled()

    def close(self) -> None:
        self.store.close()


def _at_once() -> bool:
    return True
