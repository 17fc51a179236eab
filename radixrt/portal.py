"""An event loop in a thread of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
CANCEL_SECONDS = 2.0
"""An interrupted wait (Ctrl-C) is given this long to cancel at the server what it waited for."""
FORKED = "a Client does not go along into another process: make one there"
ON_THE_LOOP = "a plain Client cannot wait inside its own async code: await the AsyncClient, or the program"


class Portal:
    """An event loop in a thread of its own, for callers that have none."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._process = os.getpid()
        self._coming = threading.Lock()
        """Held by who hands the loop a call, which nobody does while the loop is closed."""
        self._closing = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="radixrt-client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_forever()
        with self._coming:
            self._loop.run_until_complete(_cancel_others())  # calls that came after those that `close` has cancelled
            self._loop.close()

    @property
    def closed(self) -> bool:
        """It was closed, or its thread has stayed behind in the process that made it."""
        return self._loop.is_closed() or self._process != os.getpid()

    def call(self, function: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> T:
        """Await `function(*args, **kwargs)` there. An interrupted wait (Ctrl-C) cancels it, and gives it
        `CANCEL_SECONDS` to end.

        RuntimeError once the portal is closed, in a process that was forked off, and on the loop itself, which would
        wait for itself for ever."""
        if self.closed or self._is_here():
            raise RuntimeError(self._refusal())
        call = _Call(functools.partial(function, *args, **kwargs))
        try:
            with self._coming:
                if self.closed:  # meanwhile
                    call.outcome.set_exception(RuntimeError(self._refusal()))
                else:
                    self._loop.call_soon_threadsafe(call.begin)
            return call.outcome.result()
        except BaseException:
            if not call.outcome.done():
                self._loop.call_soon_threadsafe(call.stop)
                with contextlib.suppress(concurrent.futures.CancelledError, concurrent.futures.TimeoutError):
                    call.outcome.exception(CANCEL_SECONDS)
            raise

    def _refusal(self) -> str:
        if self._loop.is_closed():
            return "the client is closed"
        return FORKED if self.closed else ON_THE_LOOP

    def _is_here(self) -> bool:
        return threading.current_thread() is self._thread

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """Items of an async iterator, pulled one by one; closing the generator closes it."""
        try:
            while True:
                try:
                    yield self.call(anext, items)
                except StopAsyncIteration:
                    return
        finally:
            # An iterator that was dropped may be collected late (closing the portal has closed it) and anywhere.
            if not self.closed and not self._is_here():
                self.call(items.aclose)

    def close(self, last: Callable[[], Awaitable[None]] | None = None) -> None:
        """Await `last()` there, then end the loop and its thread; what others wait for there is cancelled. Idempotent,
        also where several threads close it: they return when it is closed. RuntimeError on the loop itself."""
        if self.closed:
            return
        if self._is_here():
            raise RuntimeError(self._refusal())
        with self._closing:
            if self.closed:  # by another thread
                return
            try:
                if last is not None:
                    self.call(last)
            finally:
                self.call(_cancel_others)
                self.call(self._loop.shutdown_asyncgens)
                self.call(self._loop.shutdown_default_executor)
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=CANCEL_SECONDS)


class _Call:
    """Work on the loop that another thread waits for. An interrupt may hit that thread at any instruction, so all that
    counts happens on the loop, in the order of its callbacks: `begin`, if at all, before `stop`."""

    def __init__(self, work: Callable[[], Awaitable[Any]]) -> None:
        self.outcome: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._work = work
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(lambda _: self.outcome.cancel())  # it was stopped before its first step

    def stop(self) -> None:
        if self._task is None:
            self.outcome.cancel()
        else:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            self.outcome.set_result(await self._work())
        except asyncio.CancelledError:
            self.outcome.cancel()
        except BaseException as problem:  # SystemExit as well: it is the other thread's, and would end the loop
            self.outcome.set_exception(problem)
