"""Functions that a program calls while its branch waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from radixrt.lang.budget import Budget, within
from radixrt.lang.threads import off_the_loop, outcome_of


@dataclass(frozen=True, slots=True)
class Call:
    """A call of `function(*args, **kwargs)`, limited to `timeout` seconds and by the budget."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    timeout: float | None
    budget: Budget | None

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    async def outcome(self) -> tuple[Any, BaseException | None]:
        """(result, problem)."""
        return await outcome_of(self.run())

    async def run(self) -> Any:
        """Run the function. Raises TimeoutError and Spent, and the function's own exceptions."""
        async with within(self.budget):
            try:
                async with asyncio.timeout(self.timeout) as limit:
                    return await off_the_loop(self.function, *self.args, **self.kwargs)
            except TimeoutError:
                if not limit.expired():  # the TimeoutError is the function's own
                    raise
                raise TimeoutError(f"{self.name}: no result in {self.timeout:g} seconds") from None


class Calls:
    """The running calls of a branch."""

    __slots__ = ("tasks",)

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[tuple[Any, BaseException | None]]] = set()

    async def outcome(self, call: Call) -> tuple[Any, BaseException | None]:
        """Returns (result, problem). If the caller or the task in `tasks` is cancelled, so is the call; a function in a
        thread continues, but its result is dropped."""
        task = asyncio.ensure_future(call.outcome())
        self.tasks.add(task)
        try:
            await asyncio.wait([task])
        finally:
            self.tasks.discard(task)
            task.cancel()
        return (None, asyncio.CancelledError()) if task.cancelled() else task.result()
