"""What is asked of the thread that has the index."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from radixrt.worker.disk.block import Job
from radixrt.worker.disk.ledger import Ledger
from radixrt.worker.disk.tasks import Read, Write


class Deletion(NamedTuple):
    """Of numbers, with what comes after them, or of the namespaces whose keys begin with a string."""

    job: Job | None
    what: list[int] | str


class Inbox:
    """Filled by any thread. Only the thread of the index takes from it."""

    def __init__(self) -> None:
        self.wake = threading.Event()
        self.writes: deque[Write] = deque()
        """To be reserved, in this order."""
        self.settled: deque[Write] = deque()
        """Whose bytes are there, or that failed."""
        self.deletions: deque[Deletion] = deque()
        self.lookups: deque[Read] = deque()
        """Of blocks that are not known here: another may just have written them."""
        self._values: dict[int, float] = {}
        self._lock = threading.Lock()

    def write(self, task: Write) -> None:
        self.writes.append(task)
        self.wake.set()

    def settle(self, task: Write) -> None:
        self.settled.append(task)
        self.wake.set()

    def look_up(self, task: Read) -> None:
        self.lookups.append(task)
        self.wake.set()

    def delete(self, what: list[int] | str, job: Job | None = None) -> None:
        self.deletions.append(Deletion(job, what))
        self.wake.set()

    def touch(self, numbers: Iterable[int], value: float) -> None:
        with self._lock:
            self._values.update(dict.fromkeys(numbers, value))

    def take_values(self) -> dict[int, float]:
        with self._lock:
            values, self._values = self._values, {}
            return values

    def put_back(self, values: dict[int, float]) -> None:
        """They could not be committed."""
        with self._lock:
            self._values = values | self._values

    @property
    def is_hurried(self) -> bool:
        """Something waits for others."""
        return bool(self.deletions) or any(x.block is None for x in list(self.writes)[:1])

    def refuse(self, ledger: Ledger, why: str) -> None:
        """End all that waits. What has settled stays, to be given up in the index once that works."""
        for task in list(self.settled):
            task.given_up = True
            ledger.end(task.job, why)
        self.refuse_waiting(ledger, why)

    def refuse_waiting(self, ledger: Ledger, why: str) -> None:
        """End all that has not begun."""
        for queue in (self.writes, self.lookups):
            while queue:
                ledger.end(queue.popleft().job, why)
        while self.deletions:
            job = self.deletions.popleft().job
            if job is not None:
                ledger.end(job, why)
