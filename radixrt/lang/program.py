"""Programs: functions that run on a branch."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

from radixrt.client import AsyncClient, Client
from radixrt.lang.batch import Batch
from radixrt.lang.branch import Branch
from radixrt.lang.errors import Site
from radixrt.lang.plain import SyncBranch
from radixrt.lang.session import Session
from radixrt.lang.threads import in_thread
from radixrt.lang.trace import begin_run

P = ParamSpec("P")
R = TypeVar("R")
AsyncFunction = Callable[Concatenate[Branch, P], Awaitable[R]]
PlainFunction = Callable[Concatenate[SyncBranch, P], R]
Awaited = Coroutine[Any, Any, R]
Calls = Iterable[Mapping[str, Any]]

AT_ONCE = 64
"""Default number of concurrent runs of a batch."""
_default: Client | None = None


def use_client(client: Client | None) -> None:
    """Set the client of programs that are run without one, in any thread of this process (`radixrt run` does)."""
    global _default
    _default = client


class Program(Generic[P, R]):
    """Calls its function with a branch and arguments of types P, and returns its result, R. See `program`."""

    def __init__(self, function: AsyncFunction[P, R] | PlainFunction[P, R]) -> None:
        """Raises TypeError for a generator function."""
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"program {function.__name__}: a program returns its result, and cannot yield")
        self.function: Callable[..., Any] = function
        self.name = function.__name__
        self._is_async = any(map(inspect.iscoroutinefunction, (function, inspect.unwrap(function))))
        functools.update_wrapper(self, cast(Callable[..., Any], function))

    @overload
    def __call__(self, client: SyncBranch, /, *args: P.args, **kwargs: P.kwargs) -> R: ...

    @overload
    def __call__(self, client: AsyncClient | Branch, /, *args: P.args, **kwargs: P.kwargs) -> Awaited[R]: ...

    def __call__(self, client: AsyncClient | Branch | SyncBranch, /, *args: Any, **kwargs: Any) -> Any:
        """Run the program on a new branch of an AsyncClient, or on a branch of a running program. Returns the
        function's result, which has to be awaited unless a SyncBranch was given.

        On a client, the result is available when all branches have done their work. Raises ProgramError for a node that
        failed, unless the function was given that error already when it asked for a value; other exceptions are the
        function's own. If the program ends early, everything that its branches still do is cancelled: nothing runs
        after its end. On a branch, nodes that were appended are executed even if the call is cancelled. Raises
        TypeError at once for anything but a client or a branch."""
        site = Site.of(sys._getframe(1))
        match client:
            case AsyncClient():
                return self._begin(client, *args, **kwargs)
            case Branch():
                return self._go_on(client, site, *args, **kwargs)
            case SyncBranch():
                return client._wait(self._go_on(client._branch, site, *args, **kwargs))
        raise TypeError(
            f"{self.name}: its first argument is an AsyncClient or a branch, not {type(client).__name__} "
            f"({self.name}.run takes a Client)"
        )

    async def _go_on(self, branch: Branch, site: Site, /, *args: Any, **kwargs: Any) -> R:
        with branch._part(self.name, site):
            return await self._call(branch, *args, **kwargs)

    async def _begin(self, client: AsyncClient, /, *args: Any, **kwargs: Any) -> R:
        client.check()
        code = self.function.__code__
        run = begin_run(self.name)
        session = Session(client)
        branch = Branch(client, self.name, Site(code.co_filename, code.co_firstlineno), session, run=run)
        try:
            result = await self._call(branch, *args, **kwargs)
            await asyncio.gather(*(_finish(one) for one in branch.family() if one.busy))
            for one in branch.family():
                one._raise_unseen()
            return result
        except BaseException:
            await branch.cancel()
            raise
        finally:
            for one in branch.family():
                one._close()
            session.end()
            if run is not None:
                run.ended = run.now()

    async def _call(self, branch: Branch, /, *args: Any, **kwargs: Any) -> R:
        result: Any
        if self._is_async:
            result = self.function(branch, *args, **kwargs)
            return await result if inspect.isawaitable(result) else result
        plain = SyncBranch(branch, asyncio.get_running_loop())
        result = await in_thread(self.function, plain, *args, **kwargs)
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            raise TypeError(
                f"program {self.name}: a plain function returned something to be awaited ({type(result).__name__}): "
                "make it an async function (a decorator of one needs functools.wraps)"
            )
        return result

    @overload
    def run(self, client: Client, /, *args: P.args, **kwargs: P.kwargs) -> R: ...

    @overload
    def run(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    @overload  # a ParamSpec takes no keyword beside its own
    def run(self, *args: Any, client: Client | None, **kwargs: Any) -> R: ...

    # mypy does not see that *args take a client before those of a ParamSpec.
    def run(self, *args: Any, **kwargs: Any) -> R:  # type: ignore[misc]
        """Run the program and wait, on a synchronous Client: `client`, the first argument, or that of `use_client`.

        Raises TypeError without any, and for an AsyncClient or a branch."""
        if args and isinstance(args[0], AsyncClient | Branch | SyncBranch):
            raise TypeError(f"{self.name}.run takes a Client; give {type(args[0]).__name__} to {self.name}(...) itself")
        client = kwargs.pop("client", None)
        if args and isinstance(args[0], Client):
            client, args = args[0], args[1:]
        client = self._client(client, "run")
        return client.run(self(client.aio, *args, **kwargs))

    @overload
    def run_batch(self, calls: Calls, client: Client | None = None, *, at_once: int = AT_ONCE) -> list[R]: ...

    @overload
    def run_batch(
        self, calls: Calls, client: Client | None = None, *, at_once: int = AT_ONCE, return_exceptions: bool
    ) -> list[R | BaseException]: ...

    def run_batch(
        self, calls: Calls, client: Client | None = None, *, at_once: int = AT_ONCE, return_exceptions: bool = False
    ) -> list[Any]:
        """`batch`, on a synchronous Client: `client`, or that of `use_client`. Raises TypeError without any."""
        client = self._client(client, "run_batch")
        return client.run(self.batch(client.aio, calls, at_once=at_once, return_exceptions=return_exceptions))

    @overload
    async def batch(self, client: AsyncClient, calls: Calls, *, at_once: int = AT_ONCE) -> list[R]: ...

    @overload
    async def batch(
        self, client: AsyncClient, calls: Calls, *, at_once: int = AT_ONCE, return_exceptions: bool
    ) -> list[R | BaseException]: ...

    async def batch(
        self, client: AsyncClient, calls: Calls, *, at_once: int = AT_ONCE, return_exceptions: bool = False
    ) -> list[Any]:
        """Run the program with the keyword arguments of each of `calls`, up to `at_once` at a time. Returns the results
        in order.

        The first exception ends the batch: running ones are cancelled, and no other is started. With
        `return_exceptions` exceptions take the place of results, and the others continue. Raises ValueError for
        `at_once` below 1, and TypeError for a call that is not a mapping. `calls` is iterated only as far as runs can
        be started."""
        if at_once < 1:
            raise ValueError(f"at_once must be 1 at least, not {at_once}")
        return await Batch(self.name, functools.partial(self, client), calls, return_exceptions).results(at_once)

    def _client(self, client: Client | None, method: str) -> Client:
        client = client or _default
        if client is None:
            raise TypeError(f"{self.name}.{method} needs a Client, or to be run by `radixrt run`")
        return client


async def _finish(branch: Branch) -> None:
    await branch._settled()
    branch._raise_unseen()


@overload
def program(function: AsyncFunction[P, R]) -> Program[P, R]: ...


@overload
def program(function: PlainFunction[P, R]) -> Program[P, R]: ...


def program(function: Callable[..., Any]) -> Program[..., Any]:
    """Decorator that makes a program of a function whose first parameter is its branch: a Branch for an async function,
    a SyncBranch for a plain one. The hit-rate report shows it under its name. Raises TypeError for a generator
    function.

        await debate(async_client, "...")    on a new branch; debate.run(client, "...") waits
        await debate(s, "...")               on a branch of another program, as a part of that one
        debate(s, "...")                     the same in a plain program
    """
    return Program(function)
