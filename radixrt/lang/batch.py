"""Runs a program for many arguments, several at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any


class Batch:
    """See `Program.batch`. A number of workers take the next call each until there are none."""

    def __init__(
        self, name: str, run: Callable[..., Any], calls: Iterable[Mapping[str, Any]], return_exceptions: bool
    ) -> None:
        """`run`, which is async, runs the program `name` with the arguments of a call."""
        self._name = name
        self._run = run
        self._calls = enumerate(calls)
        self._return_exceptions = return_exceptions
        self._results: dict[int, Any] = {}
        self._ended = False
        """Set when no further call is to be started."""

    async def results(self, at_once: int) -> list[Any]:
        """Run all calls, `at_once` at a time. Raises what a run has raised, unless exceptions are returned."""
        turns = [asyncio.ensure_future(self._take_turns()) for _ in range(at_once)]
        try:
            await asyncio.gather(*turns)
        finally:
            for turn in turns:
                turn.cancel()
            await asyncio.gather(*turns, return_exceptions=True)
        return [self._results[number] for number in range(len(self._results))]

    async def _take_turns(self) -> None:
        try:
            while not self._ended and (following := next(self._calls, None)) is not None:
                await self._take(*following)
        except BaseException:
            self._ended = True
            raise

    async def _take(self, number: int, call: Mapping[str, Any]) -> None:
        if not isinstance(call, Mapping):
            kind = type(call).__name__
            raise TypeError(f"{self._name}: call {number} of a batch is {kind}, no mapping of arguments")
        self._results[number] = None
        try:
            self._results[number] = await self._run(**call)
        except (Exception, asyncio.CancelledError) as problem:
            task = asyncio.current_task()
            if not self._return_exceptions or (task is not None and task.cancelling()):
                raise
            self._results[number] = problem
