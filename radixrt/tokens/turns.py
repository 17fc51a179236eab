"""Threads that take turns among tenants, so that the long text of one does not keep those of others waiting.

    run(tenant, steps) -> [tenant: job, job] [tenant: job] -> a thread runs one step of the first job, then requeues it

Work is a generator of steps of some milliseconds each: whoever comes next waits for at most one step per thread. What
cannot be divided is announced by yielding LONG: it has a thread of its own.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import mmap
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from radixrt.tokens.errors import FieldError

log = logging.getLogger("radixrt.router")

Result = TypeVar("Result")
Steps = Generator[object, None, Result]
"""Yields between two steps; the value says what the next one is: LONG, or anything else. Returns the result."""

LONG = "long"
"""The next step may take seconds, outside of the GIL."""
MAX_STEP_SECONDS = 5.0
MAX_LONG_SECONDS = 60.0
"""The most processor time of one step, and of a LONG one: Python code that does not end is interrupted."""
WATCH_SECONDS = 0.5
CLOSE_WATCH_SECONDS = 0.02

_set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc


class TooLong(BaseException):
    """A step has taken too much time. No Exception, so that no template's or library's handler keeps it."""


class Interrupted(FieldError):
    """What encodes the field was given up: a step of it has taken too much time."""


def in_one_step(work: Callable[..., Result], *args: Any) -> Steps[Result]:
    """Work that is not divided."""
    return work(*args)
    yield


def finished(steps: Steps[Result]) -> Result:
    """All steps at once, in the calling thread."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def finished_within(seconds: float, max_bytes: int, steps: Steps[Result]) -> Result:
    """All steps at once, in the calling thread. Raises Interrupted if they take more than so many seconds of it, or if
    the process' memory grows by more than `max_bytes` meanwhile."""
    job = _Job("", in_one_step(finished, steps), "messages")
    job.max_seconds = seconds
    ends = threading.Event()
    watch = threading.Thread(target=_watch, args=(job, ends, max_bytes), name="watch", daemon=True)
    watch.start()
    try:
        job.step()
    finally:
        ends.set()
        watch.join()
    return job.future.result()


def _watch(job: _Job, ends: threading.Event, max_bytes: int) -> None:
    most = _resident() + max_bytes
    while not ends.wait(CLOSE_WATCH_SECONDS):
        if _resident() > most:
            job.max_seconds = 0.0
        job.interrupt()


def _resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


class Turns:
    """`threads` threads, and one more for LONG steps. Both go round the tenants, and round the jobs of each."""

    def __init__(self, threads: int, max_seconds: tuple[float, float] = (MAX_STEP_SECONDS, MAX_LONG_SECONDS)) -> None:
        self._short, self._long = _Ring(threads, "tokenize"), _Ring(1, "tokenize-long")
        self._max_seconds = max_seconds
        self._running: set[_Job] = set()
        """Jobs of which a step runs now."""
        self._watch: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Jobs that wait for a thread."""
        return len(self._short) + len(self._long)

    async def run(self, tenant: str, steps: Steps[Result], field: str = "prompt", *, long: bool = False) -> Result:
        """The result of all steps, and what they raise; `long`: the first is LONG. If the task is cancelled, so are the
        steps that have not begun. Raises Interrupted if a step takes too much time."""
        job = _Job(tenant, steps, field)
        self._add(job, long)
        if self._watch is None:
            self._watch = asyncio.get_running_loop().call_later(WATCH_SECONDS, self._interrupt)
        try:
            return await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            self._short.discard(job)
            self._long.discard(job)
            raise

    def close(self) -> None:
        """End the threads; jobs that wait are cancelled."""
        for ring in (self._short, self._long):
            ring.close()
        if self._watch is not None:
            self._watch.cancel()

    def _add(self, job: _Job, long: bool) -> None:
        job.max_seconds = self._max_seconds[long]
        (self._long if long else self._short).add(job, self._turn)

    def _turn(self, job: _Job) -> None:
        """Run one step of a job."""
        self._running.add(job)
        try:
            kind = job.step()
        finally:
            self._running.discard(job)
        if not job.future.done():
            self._add(job, kind is LONG)

    def _interrupt(self) -> None:
        """Interrupt steps that have taken too much time, and look again later while there are jobs."""
        running = list(self._running)
        for job in running:
            job.interrupt()
        again = running or len(self)
        loop = asyncio.get_running_loop()
        self._watch = loop.call_later(WATCH_SECONDS, self._interrupt) if again else None


class _Job:
    __slots__ = ("_began", "_field", "_lock", "_steps", "_thread", "future", "max_seconds", "tenant")

    def __init__(self, tenant: str, steps: Steps[Any], field: str) -> None:
        self.tenant = tenant
        self.max_seconds = MAX_STEP_SECONDS
        self._field = field
        self.future: Future[Any] = Future()
        self._steps = steps
        self._lock = threading.Lock()
        self._thread, self._began = 0, 0.0
        """The thread that runs a step now, 0 if none does, and its processor time when it began."""

    def step(self) -> object:
        """Run one step; returns what it yields, None at the end. A result or an error goes to the future."""
        if self.future.cancelled():
            return None
        try:
            try:
                with self._lock:
                    self._thread, self._began = threading.get_ident(), time.thread_time()
                return next(self._steps)
            finally:
                with self._lock:
                    self._thread = 0
                    _set_exception(ctypes.c_ulong(threading.get_ident()), None)  # one that has not arrived yet
        except StopIteration as end:
            self._end(self.future.set_result, end.value)
        except TooLong:
            log.warning("tenant %r: %s was given up, one step of it took too much time", self.tenant, self._field)
            problem = Interrupted(self._field, f"{self._field}: encoding takes too much time or memory")
            self._end(self.future.set_exception, problem)
        except BaseException as error:
            self._end(self.future.set_exception, error)
        return None

    def interrupt(self) -> None:
        """Raise TooLong in the thread of the current step if that has taken more than `max_seconds` of it."""
        with self._lock:
            if not self._thread:
                return
            used = time.clock_gettime(time.pthread_getcpuclockid(self._thread)) - self._began
            if used > self.max_seconds:
                _set_exception(ctypes.c_ulong(self._thread), ctypes.py_object(TooLong))

    @staticmethod
    def _end(settle: Callable[[Any], None], value: Any) -> None:
        try:
            settle(value)
        except InvalidStateError:
            pass  # cancelled meanwhile


class _Ring:
    """Jobs by tenant, and threads that take one job of each tenant in turn."""

    def __init__(self, threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._jobs: OrderedDict[str, OrderedDict[_Job, None]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._jobs.values()))

    def add(self, job: _Job, turn: Callable[[_Job], None]) -> None:
        """Queue a job behind the tenant's others."""
        with self._lock:
            self._jobs.setdefault(job.tenant, OrderedDict())[job] = None
        try:
            self._executor.submit(self._take, turn)
        except RuntimeError:  # the threads were ended meanwhile
            self.discard(job)
            job.future.cancel()

    def discard(self, job: _Job) -> None:
        with self._lock:
            own = self._jobs.get(job.tenant)
            if own is not None:
                own.pop(job, None)
                if not own:
                    del self._jobs[job.tenant]

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            left = [job for own in self._jobs.values() for job in own]
            self._jobs.clear()
        for job in left:
            job.future.cancel()

    def _take(self, turn: Callable[[_Job], None]) -> None:
        with self._lock:
            if not self._jobs:
                return  # it was cancelled
            tenant, own = self._jobs.popitem(last=False)
            job, _ = own.popitem(last=False)
            if own:
                self._jobs[tenant] = own  # behind the other tenants
        turn(job)
