"""Calls of xgrammar that a step needs, made in a thread, so that the step need not wait for one that takes long:

    loop     hand over the step's tasks | wait ............................. | go on, without the late task
    thread                              task 0 | task 1 ............................................| ends
    thread                                                         | task 2 | task 3 |

A thread whose task is late is left behind with it, and another one does the rest. To hand over a step's tasks takes
about 20 microseconds.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

from radixrt.worker.structured.fair import at_work, be_nice

LATE_SECONDS = 0.03
"""The longest that a step waits for the tasks of one tenant: a few ordinary steps. An ordinary mask takes 3
microseconds."""


class Task:
    """A piece of work of a tenant. `begun`: whether a thread has begun it; `done`: whether it was done in time."""

    __slots__ = ("begun", "done", "tenant", "work")

    def __init__(self, tenant: str, work: Callable[[], None]) -> None:
        self.tenant = tenant
        self.work = work
        self.begun = self.done = False


class _Batch:
    """Tasks, done in order by one thread until that is left behind."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self.lock = threading.Lock()
        """Guards all below."""
        self.next = 0
        """Index of the next task to begin."""
        self.began = 0.0
        """time.perf_counter() when the task before that one began."""
        self.late: set[str] = set()
        """Tenants whose further tasks are not begun."""
        self.thread = 0
        """Native id of the thread."""
        self.left = False
        """Whether the thread is left behind with the task that it does."""
        self.finished = threading.Lock()
        """Released by the thread when all tasks are done."""
        self.finished.acquire()


class Watch:
    """Runs the tasks of steps, of one loop at a time. The work must not raise."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches: queue.SimpleQueue[_Batch] | None = None
        """Of the thread that serves; None if there is none."""

    def run(self, tasks: Sequence[Task]) -> None:
        """Do the tasks, except those of tenants whose tasks take longer than LATE_SECONDS together: they are not
        `done`, but one of each tenant may have `begun`, and then goes on beside the loop."""
        with self._lock:
            self._run(tasks)

    def _run(self, tasks: Sequence[Task]) -> None:
        batch = self._hand_over(_Batch(tasks))
        wait = LATE_SECONDS
        while not batch.finished.acquire(timeout=wait):
            with batch.lock:
                begun = batch.next
                if begun == len(tasks) and tasks[-1].done or not begun:
                    continue  # it is about to be finished, or begun
                running, late = time.perf_counter() - batch.began, tasks[begun - 1]
                if running < LATE_SECONDS:
                    wait = LATE_SECONDS - running
                    continue
                batch.left, self._batches = True, None
                batch.late.add(late.tenant)
                be_nice(batch.thread)
            tasks = [task for task in tasks[begun:] if task.tenant not in batch.late]
            if not tasks:
                return
            left, wait = batch.late, LATE_SECONDS
            batch = self._hand_over(_Batch(tasks))
            batch.late |= left

    def _hand_over(self, batch: _Batch) -> _Batch:
        if self._batches is None:
            self._batches = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._batches,), name="masks", daemon=True).start()
        self._batches.put(batch)
        return batch


def _serve(batches: queue.SimpleQueue[_Batch]) -> None:
    """Serve batches until one is left behind."""
    while True:
        batch = batches.get()
        batch.thread = threading.get_native_id()
        with at_work():
            if not _do(batch):
                return
        batch.finished.release()


def _do(batch: _Batch) -> bool:
    """Do the tasks of a batch; False if the thread is left behind."""
    spent: dict[str, float] = {}
    for index, task in enumerate(batch.tasks):
        if task.tenant in batch.late:
            continue
        with batch.lock:
            batch.next, batch.began = index + 1, time.perf_counter()
            task.begun = True
        task.work()
        with batch.lock:
            if batch.left:
                return False
            task.done = True
            spent[task.tenant] = used = spent.get(task.tenant, 0.0) + time.perf_counter() - batch.began
            if used > LATE_SECONDS:
                batch.late.add(task.tenant)
    return True
