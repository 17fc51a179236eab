"""`Branch.run_tools`: generate, make the calls, append their results, and so on until the model makes none."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Unpack

from radixrt.lang.budget import Budget
from radixrt.lang.errors import BudgetExceeded, ProgramError, Site, TooManyRounds, error_at, message_of
from radixrt.lang.functions import Function
from radixrt.lang.nodes import Fields, Node, Result, assistant, gen
from radixrt.lang.threads import outcome_of
from radixrt.lang.tools import Call, as_text
from radixrt.lang.values import Value
from radixrt.messages import Sampling, ToolCall

MAX_ROUNDS = 16


class Host(Protocol):
    """The branch of a loop (`Branch`)."""

    path: str
    _budget: Budget | None

    def _append(self, node: Node, site: Site) -> None: ...
    async def _call(self, call: Call, site: Site) -> Any: ...
    async def value(self, name: str) -> Value: ...


class ToolLoop:
    """The loop of one branch. `site` is the line of the program."""

    def __init__(self, branch: Host, tools: Sequence[Callable[..., Any]], site: Site) -> None:
        """Raises TypeError for what is no function that a model can call, and ValueError for two of one name."""
        functions = [Function(tool) for tool in tools]
        self._functions = {function.name: function for function in functions}
        if len(self._functions) < len(functions):
            raise ValueError(f"run_tools: two tools have one name, of {', '.join(one.name for one in functions)}")
        self._branch = branch
        self._tools = tools
        self._site = site

    async def run(self, name: str, sampling: Sampling, max_rounds: int, **overrides: Unpack[Fields]) -> Value:
        """See `Branch.run_tools`."""
        for number in range(max_rounds + 1):
            self._branch._append(assistant(gen(name, sampling, tools=self._tools, **overrides)), self._site)
            value = await self._branch.value(name)
            if value.finish != "stop" or not value.tool_calls:
                return value
            if number < max_rounds:
                await self._make(value.tool_calls)
        problem = TooManyRounds(f"{name!r}: the model still calls tools after {max_rounds} rounds")
        raise error_at(self._site, self._branch.path, problem)

    async def _make(self, calls: Sequence[ToolCall]) -> None:
        """Make calls, all at once, and append their results in order."""
        outcomes = await asyncio.gather(*(outcome_of(self._said(call)) for call in calls))
        for call, (said, problem) in zip(calls, outcomes, strict=True):
            if problem is not None:
                raise problem
            self._branch._append(Result(said or "", call.id, call.name), self._site)

    async def _said(self, call: ToolCall) -> str:
        """The result of a call as text; what is wrong with the call, or with its function, is told to the model."""
        function = self._functions.get(call.name)
        if function is None:
            return f"error: there is no tool {call.name!r}, only {', '.join(self._functions)}"
        try:
            arguments = function.parse(call.arguments)
        except ValueError as problem:
            return f"error: invalid arguments: {problem}"
        tool = dataclasses.replace(function.tool, append=None)
        try:
            return as_text(await self._branch._call(Call(tool, (), arguments, self._branch._budget), self._site))
        except BudgetExceeded:
            raise
        except ProgramError as error:
            if isinstance(error.problem, asyncio.CancelledError):
                raise
            return f"error: {message_of(error.problem)}"
