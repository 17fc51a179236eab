"""A function as a program."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import Any

from radixrt.client import AsyncClient, Client
from radixrt.lang.branch import Branch
from radixrt.lang.errors import Site
from radixrt.lang.plain import SyncBranch
from radixrt.lang.session import Session
from radixrt.lang.threads import in_thread
from radixrt.lang.trace import begin_run

_default: Client | None = None


def use_client(client: Client | None) -> None:
    """Set the client of programs that are run without one, in any thread of this process (`radixrt run` does)."""
    global _default
    _default = client


class Program:
    """Calls its function with a new branch and the arguments given. See `program`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = function.__name__
        functools.update_wrapper(self, function)

    async def __call__(self, client: AsyncClient, *args: Any, **kwargs: Any) -> Any:
        """Run it: what the function returns, when all its branches have done their work.

        ProgramError for what went wrong at a node, unless the function has been given it already, by asking for a value
        there, and went on; other exceptions are the function's own. Whatever ends it early cancels what its branches
        still do: nothing of a program runs on when it has ended."""
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

    async def _call(self, branch: Branch, *args: Any, **kwargs: Any) -> Any:
        if inspect.iscoroutinefunction(self.function):
            return await self.function(branch, *args, **kwargs)
        plain = SyncBranch(branch, asyncio.get_running_loop())
        return await in_thread(self.function, plain, *args, **kwargs)

    def run(self, *args: Any, client: Client | None = None, **kwargs: Any) -> Any:
        """Run it and wait, on a plain Client: `client`, the first argument, or that of `use_client`.

        TypeError without any."""
        if args and isinstance(args[0], Client):
            client, *args = args
        client = client or _default
        if client is None:
            raise TypeError(f"{self.name}.run needs a Client, or to be run by `radixrt run`")
        return client.run(self(client.aio, *args, **kwargs))


async def _finish(branch: Branch) -> None:
    await branch._settled()
    branch._raise_unseen()


def program(function: Callable[..., Any]) -> Program:
    """Make a program of a function whose first parameter is its branch: a Branch for an async function, a SyncBranch
    for a plain one. Its name is what the hit-rate report calls it."""
    return Program(function)
