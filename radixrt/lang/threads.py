"""Runs plain functions in threads, and returns outcomes instead of raising."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
Outcome = tuple[T, None] | tuple[None, BaseException]
"""(result, problem), one of them None."""


async def in_thread(function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Run `function` in a new daemon thread, and return its result. A thread pool could be exhausted by programs that
    wait for each other, and would keep the process from ending while one of its threads is busy."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()
    waiting = asyncio.wrap_future(outcome)
    context = contextvars.copy_context()

    def work() -> None:
        try:
            result = context.run(function, *args, **kwargs)
        except StopIteration as problem:  # cannot be set on a future
            outcome.set_exception(RuntimeError(f"the program raised {problem!r}"))
        except BaseException as problem:
            outcome.set_exception(problem)
        else:
            outcome.set_result(result)

    thread = threading.Thread(target=work, name=getattr(function, "__name__", "program"), daemon=True)
    thread.start()
    return await waiting


async def off_the_loop(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function: await it if it is async, otherwise run it in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    result = await in_thread(function, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result


async def outcome_of(work: Awaitable[T]) -> Outcome[T]:
    """The result or the problem of `work`. Raises nothing but CancelledError: a SystemExit in a task would end the
    event loop."""
    try:
        return await work, None
    except asyncio.CancelledError:
        raise
    except BaseException as problem:
        return None, problem
