"""What the disk tier is made of that its parts share: the face of the disk, and its figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from radixrt.worker.disk.block import Block, Changes, Job, NewBlock


class Disk(Protocol):
    """A store (`radixrt.worker.disk`) whose rows are slots of host memory: those of pages for blocks of kind "kv", and
    for "state" those of recurrent states."""

    page_bytes: int
    state_bytes: int
    """0: there are none."""

    @property
    def serves(self) -> bool:
        """Whether it can be read and written; otherwise nothing is begun."""

    @property
    def backlog(self) -> int:
        """Bytes of writes that have not ended."""

    @property
    def used(self) -> int:
        """Bytes of all that is in its folder."""

    def rates(self) -> tuple[float, float]:
        """(read, written), bytes a second; 0: not known."""

    def keeps(self, namespace: str) -> bool:
        """Whether what is of a namespace can be kept."""

    def blocks(self) -> list[Block]:
        """All that can be read, parents first. To be called once."""

    def poll(self) -> Changes: ...

    def write(self, block: NewBlock, slots: np.ndarray) -> Job: ...

    def read(self, number: int, kind: str, slots: np.ndarray, first: int = 0) -> Job: ...

    def touch(self, numbers: list[int]) -> None: ...

    def delete(self, numbers: list[int]) -> None: ...

    def delete_namespaces(self, prefix: str) -> None:
        """Delete what is of namespaces whose keys begin so, of all fingerprints."""

    def loaded(self, adapter: tuple[str, int], identity: str) -> None:
        """A LoRA adapter, by name and version, is loaded; `identity` is of its content."""

    def unloaded(self, adapter: tuple[str, int]) -> None:
        """No new request will have it."""

    def close(self) -> None: ...

    def settled(self) -> Callable[[], bool]:
        """A function that tells whether all copies to and from host memory that were begun by now have ended."""


@dataclass(slots=True)
class DiskFigures:
    """Since start, for the report."""

    hits: int = 0
    """Requests that blocks were read for."""
    read_tokens: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    """From a request's arrival to when its blocks were read, summed."""
    saved_seconds: float = 0.0
    """What computing them would have taken, by the measured rate, less that; of those requests for which it is more."""
    declined: int = 0
    """Requests for which computing was faster."""
    late: int = 0
    """Requests that did not wait for all of their blocks."""
    failed: int = 0
    """Blocks that could not be read."""
    written_tokens: int = 0
    written_bytes: int = 0
    lost_tokens: int = 0
    """That were gone from memory before they were written."""
    evicted_tokens: int = 0
    """That are gone from disk."""
    early_tokens: int = 0
    """Of these, those that a request asked for soon after."""
