"""Functions that a program calls while its branch waits."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from radixrt.lang.budget import Budget, within
from radixrt.lang.threads import off_the_loop, outcome_of

R = TypeVar("R")
OPTIONS = ("timeout", "append")
"""Of `Branch.tool`; the fields of a Tool."""


@dataclass(frozen=True)
class Tool(Generic[R]):
    """A function, and the options with which a program calls it: seconds until it is given up, and the role with which
    its result is appended. A Tool may be given wherever a tool is; its calls pass all arguments on to the function."""

    function: Callable[..., R]
    timeout: float | None = None
    append: str | None = None

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        return self.function(*args, **kwargs)

    @classmethod
    def of(cls, function: Callable[..., R], arguments: dict[str, Any]) -> Tool[R]:
        """A Tool of `function`, with the options that are among the keyword `arguments` of a call, which are removed
        there. An argument that the function itself takes is no option."""
        if isinstance(function, Tool):
            return function
        options = {name: arguments.pop(name) for name in OPTIONS if name in arguments and not _takes(function, name)}
        return cls(function, **options)


def _takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of that name. Of some that are written in C nothing is known: they have
    not."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return False
    if name in parameters:
        return parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())


def as_text(result: Any) -> str:
    """The result of a call as a model gets it: text as it is, anything else as JSON."""
    return result if isinstance(result, str) else msgspec.json.encode(result).decode()


@dataclass(frozen=True, slots=True)
class Call:
    """A call of `tool(*args, **kwargs)`, limited to its timeout and by the budget."""

    tool: Tool[Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    budget: Budget | None

    async def outcome(self) -> tuple[Any, BaseException | None]:
        """(result, problem)."""
        return await outcome_of(self.run())

    async def run(self) -> Any:
        """Run the function. Raises TimeoutError and Spent, and the function's own exceptions."""
        async with within(self.budget):
            try:
                async with asyncio.timeout(self.tool.timeout) as limit:
                    return await off_the_loop(self.tool.function, *self.args, **self.kwargs)
            except TimeoutError:
                if not limit.expired():  # the TimeoutError is the function's own
                    raise
                raise TimeoutError(f"{self.tool.name}: no result in {self.tool.timeout:g} seconds") from None


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
