"""Runs coroutines for synchronous callers, on an event loop in a background thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
CANCEL_SECONDS = 2.0
"""After an interrupt (Ctrl-C), a call has this long to cancel its request at the server."""
FORKED = "a Client does not go along into another process: make one there"
ON_THE_LOOP = "a plain Client cannot wait inside its own async code: await the AsyncClient, or the program"


class EventLoopThread:
    """An event loop in a background thread, for callers without one. Thread-safe."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._process = os.getpid()
        self._handover = threading.Lock()
        """Held while a call is handed to the loop, and while the loop is closed."""
        self._closing = threading.RLock()
        """Held by the thread that calls `close`."""
        self._thread = threading.Thread(target=self._run, name="radixrt-client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_forever()
        with self._handover:
            self._loop.run_until_complete(_cancel_others())  # calls that came after `close` has cancelled all
            self._loop.close()

    @property
    def closed(self) -> bool:
        """Whether it was closed, or this is a forked process, which does not have its thread."""
        return self._loop.is_closed() or self._process != os.getpid()

    def call(self, function: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> T:
        """Await `function(*args, **kwargs)` on the loop, and return its result. An interrupt (Ctrl-C) cancels it, and
        gives it CANCEL_SECONDS to end.

        Raises RuntimeError if it is closed, in a forked process, and on the loop's own thread, where it would
        wait for itself."""
        if self.closed or self._is_here():
            raise RuntimeError(self._refusal())
        call = _Call(functools.partial(function, *args, **kwargs))
        try:
            with self._handover:
                if self.closed:  # by another thread, since the check above
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

    def iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """Iterate over an async iterator on the loop, one call per item. Closing this generator closes the iterator."""
        try:
            while True:
                try:
                    yield self.call(anext, items)
                except StopAsyncIteration:
                    return
        finally:
            # A generator that was not exhausted is closed by the garbage collector: at any time, on any thread. If the
            # event loop was closed before, so was the iterator.
            if not self.closed and not self._is_here():
                self.call(items.aclose)

    def close(self, last: Callable[[], Awaitable[None]] | None = None) -> None:
        """Await `last()` on the loop, cancel all other calls, and end the loop and its thread. Idempotent; if several
        threads call it, each returns once it is closed. Raises RuntimeError on the loop's own thread."""
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
    """A coroutine on the loop, for whose `outcome` another thread waits. An interrupt may hit that thread at any
    instruction, so state changes only on the loop, in the order of its callbacks: `begin`, if it is called at all, runs
    before `stop`."""

    def __init__(self, work: Callable[[], Awaitable[Any]]) -> None:
        self.outcome: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._work = work
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(lambda _: self.outcome.cancel())  # takes effect if stopped before its first step

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
        except BaseException as problem:  # also SystemExit: it is for the waiting thread, and would end the loop
            self.outcome.set_exception(problem)
