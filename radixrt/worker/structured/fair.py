"""Threads that are shared fairly: tenants take turns, and each has a few of the threads at most. So work that never
ends holds up only the tenant that sent it."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

MAX_THREADS = 64
"""The most threads, however many tenants there are."""
EXIT_SECONDS = 3.0
"""How long a process that ends waits for work in C++: a thread that returns to an interpreter that is being finalized
aborts the process."""
NICE = 10
"""Niceness of the threads, where the system knows one for each thread: the worker's loop must not wait for a core."""


def be_nice(thread: int) -> None:
    """Give way to others: set the niceness of a thread, by its native id."""
    if sys.platform == "linux":  # elsewhere it is that of a process
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, NICE)


_at_work: set[int] = set()
"""Identities of the threads that do a piece of work."""


@contextlib.contextmanager
def at_work() -> Iterator[None]:
    """This thread does a piece of work: the process should not end within."""
    me = threading.get_ident()
    _at_work.add(me)
    try:
        yield
    finally:
        _at_work.discard(me)


def is_at_work(seconds: float = EXIT_SECONDS) -> bool:
    """Whether a thread is still at work after so many seconds, or less if none is before."""
    deadline = time.monotonic() + seconds
    while _at_work and time.monotonic() < deadline:
        time.sleep(0.005)
    return bool(_at_work)


atexit.register(is_at_work)


class Job:
    """A piece of work of a tenant. `began`: time.monotonic() when a thread began it, in seconds; None before."""

    __slots__ = ("began", "future", "tenant", "work")

    def __init__(self, tenant: str, work: Callable[[], Any]) -> None:
        self.tenant = tenant
        self.work = work
        self.future: Future[Any] = Future()
        self.began: float | None = None

    def is_overdue(self, seconds: float, now: float) -> bool:
        """Whether it has been running for longer than `seconds`."""
        return self.began is not None and now - self.began > seconds and not self.future.done()


class FairThreads:
    """At most `most` daemon threads, of which the work of one tenant takes `each` at most; beyond `most`, one for each
    tenant that has none. They start when there is work, and end when there is none. What calls xgrammar can run here
    beside the loop: its calls release the GIL."""

    def __init__(self, name: str, most: int, each: int) -> None:
        self._name = name
        self._most = most
        self._each = each
        self._lock = threading.Lock()
        """Guards all below."""
        self._queued: OrderedDict[str, deque[Job]] = OrderedDict()
        """By tenant, the one whose turn it is first; none is empty."""
        self._running: dict[str, int] = {}
        """Threads by tenant."""
        self._threads = 0

    def submit(self, tenant: str, work: Callable[[], Any]) -> Job:
        """Queue a piece of work; its future has what the work returns or raises."""
        job = Job(tenant, work)
        with self._lock:
            self._queued.setdefault(tenant, deque()).append(job)
            more = self._may_begin(tenant, self._threads + 1)
            self._threads += more
        if more:  # daemon threads, so that work does not keep the process from ending
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()
        return job

    def queued(self, tenant: str) -> int:
        """How many jobs of a tenant no thread has begun."""
        with self._lock:
            return len(self._queued.get(tenant, ()))

    def cancel(self, job: Job) -> bool:
        """Remove a job that no thread has begun; False if one has."""
        with self._lock:
            jobs = self._queued.get(job.tenant)
            if jobs is None or job not in jobs:
                return False
            jobs.remove(job)
            if not jobs:
                del self._queued[job.tenant]
        job.future.cancel()
        return True

    def _may_begin(self, tenant: str, threads: int) -> bool:
        """Whether a job of a tenant may begin when there are so many threads."""
        running = self._running.get(tenant, 0)
        return threads <= (self._most if running else MAX_THREADS) and running < self._each

    def _serve(self) -> None:
        be_nice(threading.get_native_id())
        while (job := self._take()) is not None:
            job.began = time.monotonic()
            with at_work():
                try:
                    job.future.set_result(job.work())
                except BaseException as error:  # whoever waits for the future must learn of it
                    job.future.set_exception(error)
            with self._lock:
                self._running[job.tenant] -= 1
                if not self._running[job.tenant]:
                    del self._running[job.tenant]

    def _take(self) -> Job | None:
        """The next job of the tenant whose turn it is; None, and this thread ends, if none may begin."""
        with self._lock:
            tenant = next((one for one in self._queued if self._may_begin(one, self._threads)), None)
            if tenant is None:
                self._threads -= 1
                return None
            jobs = self._queued.pop(tenant)
            job = jobs.popleft()
            if jobs:
                self._queued[tenant] = jobs  # behind the others
            self._running[tenant] = self._running.get(tenant, 0) + 1
            return job
