"""The plain face: programs that are ordinary functions, in a thread of their own."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Self, TypeVar

from radixrt.lang.branch import Branch, Value, join
from radixrt.lang.errors import Site
from radixrt.lang.nodes import Node

T = TypeVar("T")


class SyncBranch:
    """A Branch for a program that is a plain function: the same, but `s[name]` waits and returns the text."""

    def __init__(self, branch: Branch, loop: asyncio.AbstractEventLoop) -> None:
        self._branch = branch
        self._loop = loop

    @property
    def path(self) -> str:
        """See Branch."""
        return self._branch.path

    @property
    def depth(self) -> int:
        """See Branch."""
        return self._branch.depth

    def __iadd__(self, node: Node) -> Self:
        self._call(self._branch._append, node, Site.of(sys._getframe(1)))
        return self

    def fork(self, count: int = 2) -> list[SyncBranch]:
        """See Branch.fork."""
        children = self._call(self._branch._fork, count, Site.of(sys._getframe(1)))
        return [SyncBranch(child, self._loop) for child in children]

    def __getitem__(self, name: str) -> str:
        return self.value(name).text

    def value(self, name: str) -> Value:
        """See Branch.value."""
        return self._wait(self._branch.value(name))

    def parse(self, name: str) -> Any:
        """See Branch.parse."""
        return self._wait(self._branch.parse(name))

    def stream(self, name: str) -> Iterator[str]:
        """See Branch.stream."""
        pieces = self._branch.stream(name)
        while (piece := self._wait(_next(pieces))) is not None:
            yield piece

    def wait(self) -> Self:
        """See Branch.wait."""
        self._wait(self._branch.wait())
        return self

    def join(self, branches: Sequence[SyncBranch]) -> list[SyncBranch]:
        """Wait until all that was appended to `branches` is done: the branches. ProgramError as of `join`."""
        self._wait(join(*(branch._branch for branch in branches)))
        return list(branches)

    def cancel(self) -> None:
        """See Branch.cancel."""
        self._wait(self._branch.cancel())

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            waiting = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop has ended, and the program with it
            work.close()
            raise
        return waiting.result()

    def _call(self, function: Callable[..., T], *args: Any) -> T:
        """Call something on the event loop."""
        outcome: Future[T] = Future()
        self._loop.call_soon_threadsafe(_settle, outcome, function, args)
        return outcome.result()


async def _next(items: AsyncIterator[str]) -> str | None:
    return await anext(items, None)


def _settle(outcome: Future[T], function: Callable[..., T], args: Sequence[Any]) -> None:
    try:
        outcome.set_result(function(*args))
    except BaseException as problem:
        outcome.set_exception(problem)


async def in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """What `function` returns, run in a thread of its own: a pool's threads would be used up by programs that wait for
    each other, and the process could not end while one of them is busy."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()
    waiting = asyncio.wrap_future(outcome)
    context = contextvars.copy_context()

    def work() -> None:
        try:
            result = context.run(function, *args, **kwargs)
        except StopIteration as problem:  # which no future takes
            outcome.set_exception(RuntimeError(f"the program raised {problem!r}"))
        except BaseException as problem:
            outcome.set_exception(problem)
        else:
            outcome.set_result(result)

    thread = threading.Thread(target=work, name=getattr(function, "__name__", "program"), daemon=True)
    thread.start()
    return await waiting
