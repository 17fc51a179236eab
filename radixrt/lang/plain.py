"""The synchronous interface: programs that are plain functions, each run in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Self, TypeVar, Unpack, overload

from radixrt.client import CacheOutcome
from radixrt.lang.branch import Branch, listed, wait_all
from radixrt.lang.budget import Budget
from radixrt.lang.errors import Site
from radixrt.lang.nodes import Fields, Node
from radixrt.lang.race import run_race
from radixrt.lang.threads import in_thread, outcome_of
from radixrt.lang.tool_loop import MAX_ROUNDS, ToolLoop
from radixrt.lang.tools import Call, Tool
from radixrt.lang.values import Value
from radixrt.messages import CacheVerb, Sampling

T = TypeVar("T")
ON_THE_LOOP = "a SyncBranch cannot wait inside async code: use it in plain functions, or make the program an async one"


class SyncBranch:
    """A Branch for a program that is a plain function: the same methods, but they wait; `s[name]` returns the text."""

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

    __iter__ = None
    """Not iterable: values have names, and no order."""

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

    def text(self) -> str:
        """See Branch.text."""
        return self._wait(self._branch.text())

    def messages(self) -> list[dict[str, Any]]:
        """See Branch.messages."""
        return self._wait(self._branch.messages())

    def hint(
        self, verb: CacheVerb, *, priority: int = 50, seconds: float | None = None, worker: str = ""
    ) -> CacheOutcome:
        """See Branch.hint."""
        return self._wait(self._branch.hint(verb, priority=priority, seconds=seconds, worker=worker))

    def wait(self) -> Self:
        """See Branch.wait."""
        self._wait(self._branch.wait())
        return self

    def join(self, *branches: SyncBranch | Sequence[SyncBranch]) -> list[SyncBranch]:
        """See `branch.join`."""
        plain = listed(branches)
        self._wait(wait_all([branch._branch for branch in plain]))
        return plain

    def race(
        self,
        branches: Sequence[SyncBranch],
        work: str | Callable[[SyncBranch], Any],
        *,
        until: Callable[[Any], bool] | None = None,
    ) -> tuple[SyncBranch, Any]:
        """See `race`. `work` and `until` are plain functions, each run in a thread of its own. If its branch has lost,
        a function that is still busy continues until it next uses the branch."""

        async def run(branch: Branch) -> Any:
            return await (branch[work] if isinstance(work, str) else in_thread(work, SyncBranch(branch, self._loop)))

        plain = [branch._branch for branch in branches]
        will_do = functools.partial(in_thread, until) if until else None
        racing = run_race(plain, run, will_do, Site.of(sys._getframe(1)))
        branch, result = self._wait(racing)
        return branches[plain.index(branch)], result

    @overload
    def tool(
        self,
        function: Callable[..., Coroutine[Any, Any, T]],
        /,
        *args: Any,
        timeout: float | None = None,
        append: str | None = None,
        **kwargs: Any,
    ) -> T: ...

    @overload
    def tool(
        self,
        function: Callable[..., T],
        /,
        *args: Any,
        timeout: float | None = None,
        append: str | None = None,
        **kwargs: Any,
    ) -> T: ...

    def tool(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """See Branch.tool."""
        call = Call(Tool.of(function, kwargs), args, kwargs, self._branch._budget)
        return self._wait(self._branch._call(call, Site.of(sys._getframe(1))))

    def run_tools(
        self,
        name: str,
        tools: Sequence[Callable[..., Any]],
        sampling: Sampling = Sampling(),
        *,
        max_rounds: int = MAX_ROUNDS,
        **overrides: Unpack[Fields],
    ) -> Value:
        """See Branch.run_tools."""
        loop = ToolLoop(self._branch, tools, Site.of(sys._getframe(1)))
        return self._wait(loop.run(name, sampling, max_rounds, **overrides))

    def budget(
        self, *, tokens: int | None = None, seconds: float | None = None
    ) -> contextlib.AbstractContextManager[Budget]:
        """See Branch.budget."""
        budget = Budget(tokens, seconds, self._branch._budget, Site.of(sys._getframe(1)))
        return self._branch._under(budget)

    def cancel(self) -> None:
        """See Branch.cancel."""
        self._wait(self._branch.cancel())

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        outcome = outcome_of(work)
        try:
            self._check_thread()
            waiting = asyncio.run_coroutine_threadsafe(outcome, self._loop)
        except RuntimeError:  # called from the wrong thread, or the program's event loop has ended
            outcome.close()
            work.close()
            raise
        match waiting.result():
            case result, None:
                return result
            case _, problem:
                raise problem

    def _call(self, function: Callable[..., T], *args: Any) -> T:
        """Call something on the event loop."""
        self._check_thread()
        outcome: Future[T] = Future()
        self._loop.call_soon_threadsafe(_settle, outcome, function, args)
        return outcome.result()

    def _check_thread(self) -> None:
        """Raise RuntimeError if called on the event loop itself, which would deadlock."""
        if asyncio._get_running_loop() is self._loop:
            raise RuntimeError(ON_THE_LOOP)


async def _next(items: AsyncIterator[str]) -> str | None:
    return await anext(items, None)


def _settle(outcome: Future[T], function: Callable[..., T], args: Sequence[Any]) -> None:
    try:
        outcome.set_result(function(*args))
    except BaseException as problem:
        outcome.set_exception(problem)
