"""What the store's threads tell its caller: jobs that ended, blocks that came and went."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from radixrt.worker.disk.block import Block, Changes, Job
from radixrt.worker.disk.tasks import Task


class Ledger:
    """Jobs between the caller's thread and the store's. No method waits for a disk."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Job, tuple[Task | None, float]] = {}
        self._changes = Changes([], [], [])
        self.backlog = 0
        """Bytes of writes that have not ended."""
        self.is_empty = True
        """Nothing to be told."""

    def begin(self, job: Job, task: Task | None = None) -> None:
        with self._lock:
            self._open[job] = task, time.monotonic()
            if job.kind == "write":
                self.backlog += job.nbytes

    def end(self, job: Job, why: str = "") -> bool:
        """A job has ended; not ok if there is a `why`. False if it had before."""
        with self._lock:
            found = self._open.pop(job, None)
            if found is None:
                return False
            if job.kind == "write":
                self.backlog -= job.nbytes
            job.ok, job.why, job.seconds = not why, why, time.monotonic() - found[1]
            self._changes.finished.append(job)
            self.is_empty = False
            return True

    def change(self, added: Iterable[Block] = (), removed: Iterable[int] = ()) -> None:
        """Blocks come and gone."""
        with self._lock:
            self._changes.added.extend(added)
            self._changes.removed.extend(removed)
            self.is_empty = not any(self._changes)

    def take(self) -> Changes:
        with self._lock:
            changes, self._changes = self._changes, Changes([], [], [])
            self.is_empty = True
            return changes

    def take_added(self) -> list[Block]:
        """Blocks that came, and nothing else."""
        with self._lock:
            added, self._changes = self._changes.added, self._changes._replace(added=[])
            self.is_empty = not any(self._changes)
            return added

    def open(self) -> list[tuple[Job, Task | None]]:
        with self._lock:
            return [(job, task) for job, (task, _) in self._open.items()]

    @property
    def is_idle(self) -> bool:
        return not self._open
