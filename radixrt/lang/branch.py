"""A branch of a running program: nodes go in, values come out, and one task executes the nodes in order."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar, Unpack, overload

from radixrt.client import AsyncClient, CacheOutcome
from radixrt.lang.budget import Budget, within
from radixrt.lang.errors import ProgramError, Site, error_at
from radixrt.lang.history import History
from radixrt.lang.nodes import Fields, Gen, Node, Result, Role, Select, role
from radixrt.lang.session import PAUSE_AFTER, Session
from radixrt.lang.speaker import Speaker, Work
from radixrt.lang.steps import Run
from radixrt.lang.tool_loop import MAX_ROUNDS, ToolLoop
from radixrt.lang.tools import Call, Calls, Tool, as_text
from radixrt.lang.values import Promise, Text, Value, kind_of
from radixrt.messages import CacheAction, CacheVerb, Origin, Sampling

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Fork:
    children: tuple[Branch, ...]


class Branch:
    """One branch of a program's text. `s += node` appends and never waits; `await s[name]` is the text of a gen or
    select.

    Branches are created by a program and by `fork`. `path` is the path from the root ("0.2": the third child of the
    first child), `depth` the number of forks above it.

    If a node fails, its branch and those forked off it have failed: their requests are cancelled, and everything that
    is appended later fails as well. Other branches continue. The error is raised wherever the program waits for a
    value, or at its end if it never did.
    """

    def __init__(
        self,
        client: AsyncClient,
        program: str,
        site: Site,
        session: Session,
        path: str = "",
        depth: int = 0,
        run: Run | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.path = path
        self.depth = depth
        self._client = client
        self._origin = Origin(program, path, depth)
        self._speaker = Speaker(client, self._origin, run, session)
        self._session = session
        self._run = run
        self._budget = budget
        self._promises: dict[str, Promise] = {}
        """The last one of each name."""
        self._queue: deque[Work] = deque()
        self._doing: Work | None = None
        self._task: asyncio.Task[None] | None = None
        self._calls = Calls()
        self._started = asyncio.Event()
        """Set when the parent has executed the fork."""
        if not path:
            self._started.set()
        self._failure: ProgramError | None = None
        self.cancelled = False
        """Whether `cancel` was called: nothing more is done here."""
        self._closed = False
        """Whether the program has ended."""
        self._site = site
        self._children: list[Branch] = []

    # ------------------------------------------------------------ in

    def __iadd__(self, node: Node) -> Self:
        self._append(node, Site.of(sys._getframe(1)))
        return self

    def fork(self, count: int = 2) -> list[Branch]:
        """Create branches that begin with everything appended here so far, which is computed once.

        Raises ValueError for a count below 1."""
        return self._fork(count, Site.of(sys._getframe(1)))

    def _fork(self, count: int, site: Site) -> list[Branch]:
        if count < 1:
            raise ValueError(f"fork: count must be at least 1, not {count}")
        first = len(self._children)
        children = [self._child(first + i, site) for i in range(count)]
        self._children += children
        self._append(_Fork(tuple(children)), site)
        return children

    def _child(self, number: int, site: Site) -> Branch:
        path = f"{self.path}.{number}" if self.path else str(number)
        depth, run, budget = self.depth + 1, self._run, self._budget
        child = Branch(self._client, self._origin.program, site, self._session, path, depth, run, budget)
        child._promises = dict(self._promises)
        return child

    def _append(self, node: Node | _Fork, site: Site) -> None:
        self._check_open()
        promises: deque[Promise] = deque()
        for part in node.parts if isinstance(node, Role) else (node,):
            if isinstance(part, Gen | Select):
                promises.append(self._promise(part))
            elif not isinstance(part, str | Result | _Fork):
                raise TypeError(f"expected text, gen, select or a role, not {kind_of(part)}")
        self._queue.append(Work(node, site, promises, self._budget))
        self._start()

    def _promise(self, node: Gen | Select) -> Promise:
        promise = self._promises[node.name] = Promise(isinstance(node, Gen) and node.stream)
        return promise

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"the program {self._origin.program} has ended")

    def budget(self, *, tokens: int | None = None, seconds: float | None = None) -> contextlib.AbstractContextManager:
        """`with s.budget(tokens=500, seconds=10) as budget:` limits everything that is appended here inside the block,
        and branches forked inside it for all their life: the sum of generated tokens, and wall time from the block's
        begin.

        A gen's max_tokens is at most what is left. Whatever still runs when a budget is spent is stopped, and raises
        BudgetExceeded. Budgets nest: the smallest counts. Raises ValueError without tokens and seconds."""
        return self._under(Budget(tokens, seconds, self._budget, Site.of(sys._getframe(1))))

    @contextlib.contextmanager
    def _under(self, budget: Budget) -> Iterator[Budget]:
        before, self._budget = self._budget, budget
        budget.begin()
        try:
            yield budget
        finally:
            self._budget = before

    # ------------------------------------------------------------ out

    __iter__ = None
    """Not iterable: values have names, and no order."""

    def __getitem__(self, name: str) -> Awaitable[str]:
        """The text of the last gen or select of that name. Raises KeyError if there is none, ProgramError if it
        failed."""
        return Text(name, self._latest(name))

    async def value(self, name: str) -> Value:
        """The Value of the last gen or select of that name. Raises as `s[name]` does."""
        return await self._latest(name)

    async def parse(self, name: str) -> Any:
        """`Value.parse` of that value. Raises as `s[name]` does, and ValueError for text that was cut off."""
        return (await self.value(name)).parse()

    def _latest(self, name: str) -> Promise:
        if name not in self._promises:
            known = ", ".join(self._promises) or "none"
            raise KeyError(f"no gen or select {name!r} was appended to this branch ({known})")
        return self._promises[name]

    async def stream(self, name: str) -> AsyncIterator[str]:
        """The text of a `gen(name, stream=True)` as it arrives; late readers get all of it, too.

        Leaving the loop early does not stop the generation, since others may read it: `cancel` does.

        Raises KeyError and ProgramError as `s[name]` does, and ValueError for a gen that does not stream."""
        promise = self._latest(name)
        if not promise.streams:
            raise ValueError(f"{name!r} was not appended as gen({name!r}, stream=True)")
        async for piece in promise.stream():
            yield piece

    async def text(self) -> str:
        """The whole text of the branch, after everything appended so far has been done. Raises ProgramError as `wait`
        does, and ValueError in a program that uses roles."""
        return (await self.wait())._speaker.history.text()

    async def messages(self) -> list[dict[str, Any]]:
        """As `text`, for a program that uses roles: `role` and `content` of each message, in OpenAI's format, and the
        `tool_calls` and `tool_call_id` of calls and results. An answer without calls is as it was generated, with its
        thoughts."""
        return (await self.wait())._speaker.history.messages()

    async def hint(
        self, verb: CacheVerb, *, priority: int = 50, seconds: float | None = None, worker: str = ""
    ) -> CacheOutcome:
        """Give the server's cache a hint for what was said here so far, up to the last generated text, once it is done:
        `pin` or `retain` it for a time, `demote` or `prefetch` it, or `share` it with a worker; see `Client.pin` and
        the others. Returns what became of it. The program is right without. Raises ProgramError as `wait` does."""
        action = CacheAction(verb, priority=priority, seconds=seconds, destination=worker)
        return await (await self.wait())._speaker.hint(action)

    async def wait(self) -> Self:
        """Wait until everything appended so far has been done. Raises ProgramError if something failed or was
        cancelled."""
        if (failure := await self._settled()) is not None:
            failure.seen = True
            raise failure
        return self

    async def _settled(self) -> ProgramError | None:
        """Wait until everything appended so far has been done; returns the failure, if any."""
        await self._started.wait()
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])
        return self._failure

    @property
    def busy(self) -> bool:
        """Whether something that was appended is not done yet."""
        return bool(self._queue) or (self._task is not None and not self._task.done())

    def _raise_unseen(self) -> None:
        """Raise the failure, unless the program was given it already, or has cancelled the branch itself."""
        if self._failure is not None and not self._failure.seen and not self.cancelled:
            raise self._failure

    # ------------------------------------------------------------ tools

    @overload
    def tool(
        self,
        function: Callable[..., Coroutine[Any, Any, R]],
        /,
        *args: Any,
        timeout: float | None = None,
        append: str | None = None,
        **kwargs: Any,
    ) -> Awaitable[R]: ...

    @overload
    def tool(
        self,
        function: Callable[..., R],
        /,
        *args: Any,
        timeout: float | None = None,
        append: str | None = None,
        **kwargs: Any,
    ) -> Awaitable[R]: ...

    def tool(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        """Call a tool: `await s.tool(search, query)` returns the result of `function(*args, **kwargs)`. A plain
        function runs in a thread.

        With `append="tool"` the result is appended to the branch as a message of that role, as it is if it is text, and
        otherwise as JSON. `timeout` is in seconds; the branch's budget applies as well. A function that takes a
        `timeout` or `append` itself gets it; its options are then given by `s.tool(Tool(function, timeout=5), ...)`.
        Raises ProgramError for an exception of the function, a timeout, or a branch that was cancelled meanwhile; the
        branch can be used after it."""
        call = Call(Tool.of(function, kwargs), args, kwargs, self._budget)
        return self._call(call, Site.of(sys._getframe(1)))

    def run_tools(
        self,
        name: str,
        tools: Sequence[Callable[..., Any]],
        sampling: Sampling = Sampling(),
        *,
        max_rounds: int = MAX_ROUNDS,
        **overrides: Unpack[Fields],
    ) -> Awaitable[Value]:
        """Let the model call tools: generate an answer `name` with these tools, make its calls, all of one answer at
        once, append their results, and so on until an answer has no call, or is cut off. Returns the Value of that.

            answer = await s.run_tools("answer", [search, Tool(fetch, timeout=5)], max_tokens=512)

        Arguments are converted to the types of the parameters; results that are no text become JSON. What is wrong with
        a call, and an exception of its function, is told to the model as the call's result. Raises ProgramError if the
        model calls tools in more than `max_rounds` answers, and as `value` does; TypeError and ValueError as `gen`."""
        loop = ToolLoop(self, tools, Site.of(sys._getframe(1)))
        return loop.run(name, sampling, max_rounds, **overrides)

    async def _call(self, call: Call, site: Site) -> Any:
        self._check_open()
        step = self._run and self._run.begin(self.path, "tool", call.tool.name, site)
        result: Any = None
        problem: BaseException | None = asyncio.CancelledError()
        pause = asyncio.get_running_loop().call_later(PAUSE_AFTER, self._pause, call.tool.timeout)
        try:
            if self._failure is None:
                result, problem = await self._calls.outcome(call)
        finally:
            pause.cancel()
            if self._run and step:
                step.said = "" if problem else str(result)
                self._run.end(step, problem)
        if problem is not None:
            if not isinstance(problem, Exception | asyncio.CancelledError):  # it wants to exit
                raise problem
            raise error_at(site, self.path, problem)
        if (append := call.tool.append) is not None:
            self._append(role(append, as_text(result)), site)
        return result

    def _pause(self, seconds: float | None) -> None:
        """A tool has been running for PAUSE_AFTER: tell the server, unless the branch has other requests to make."""
        if self._failure is None and not self._closed and not any(map(_needs_server, (*self._queue, self._doing))):
            self._speaker.pause(seconds)

    def _part(self, name: str, site: Site) -> contextlib.AbstractContextManager[Any]:
        """The block runs another program on this branch."""
        self._check_open()
        return self._run.timed(self.path, "program", name, site) if self._run else contextlib.nullcontext()

    # ------------------------------------------------------------ the task

    def _start(self) -> None:
        if self._started.is_set() and self._queue and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._work_off(), name=f"branch {self.path}")

    def _begin(self, history: History | None, failure: ProgramError | None = None) -> None:
        """The parent has executed the fork, or has failed before it."""
        if self.cancelled:
            return
        if history is not None:
            self._speaker.history = history
        self._failure = failure
        self._started.set()
        self._start()

    async def _work_off(self) -> None:
        while self._queue:
            self._doing = work = self._queue.popleft()
            if self._failure is None:
                try:
                    await self._do(work)
                    continue
                except BaseException as problem:
                    self._fail(work.site, problem)
                    if not isinstance(problem, Exception):
                        self._give_up(work)
                        raise
            self._give_up(work)
        self._doing = None

    def _fail(self, site: Site, problem: BaseException) -> None:
        """The branch has failed, and with it those below."""
        if self._failure is None:
            self._failure = error_at(site, self.path, problem)
        for branch in self._below():
            branch._stop()
            branch._end(self._failure)

    def _give_up(self, work: Work) -> None:
        """Pass the failure on to everything that waits for this work."""
        assert self._failure is not None
        for promise in work.promises:
            promise.fail(self._failure)
        for child in work.node.children if isinstance(work.node, _Fork) else ():
            child._begin(None, self._failure)
            child.cancelled |= self.cancelled  # it may have been forked off after `cancel`

    async def _do(self, work: Work) -> None:
        if not isinstance(work.node, _Fork):
            await self._speaker.say(work)
            return
        children = work.node.children
        async with within(work.budget):
            await self._speaker.fork(len(children))
        if self._run:
            step = self._run.begin(self.path, "fork", str(len(children)), work.site)
            step.forks = tuple(child.path for child in children)
        for child in children:
            child._begin(self._speaker.history.copy())

    # ------------------------------------------------------------ the end

    def family(self) -> Iterator[Branch]:
        """This branch and all below it, parents first."""
        found = deque([self])
        while found:
            branch = found.popleft()
            yield branch
            found.extend(branch._children)

    def _below(self) -> list[Branch]:
        return list(self.family())[1:]

    async def cancel(self) -> None:
        """Stop this branch and all below it: their requests are cancelled at the server, and waiting for their values
        raises ProgramError. The rest of the program continues."""
        family = list(self.family())
        for branch in family:
            branch.cancelled = True
        tasks = [task for branch in family for task in branch._stop()]
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            for branch in family:
                branch._end(None)

    def _stop(self) -> list[asyncio.Task[Any]]:
        """Cancel the running tasks of this branch; returns them."""
        tasks = [task for task in (self._task, *self._calls.tasks) if task is not None and not task.done()]
        for task in tasks:
            task.cancel()
        return tasks

    def _close(self) -> None:
        """The program has ended: nothing more is started here."""
        self._closed = True
        self._stop()

    def _end(self, failure: ProgramError | None) -> None:
        """Fail everything that still waits, after the task has ended or was never started."""
        if self._failure is None:
            self._failure = failure or error_at(self._site, self.path, asyncio.CancelledError())
        while self._queue:
            self._give_up(self._queue.popleft())
        self._started.set()


def _needs_server(work: Work | None) -> bool:
    """Whether work makes a request to the server."""
    return work is not None and (isinstance(work.node, _Fork) or bool(work.promises))


def join(*branches: Branch | Sequence[Branch]) -> Awaitable[list[Branch]]:
    """Wait until everything appended to these branches is done; they may be given as one list. Returns the branches.
    Raises the ProgramError of the first that failed or was cancelled, and TypeError for branches of a plain program."""
    return wait_all(check_branches("join", listed(branches)))


async def wait_all(branches: list[Branch]) -> list[Branch]:
    """See `join`."""
    await asyncio.gather(*(branch.wait() for branch in branches))
    return branches


def listed(branches: Sequence[Any]) -> list[Any]:
    """Branches that were given as arguments, or as one list."""
    match branches:
        case [[*given]]:
            return given
    return [*branches]


def check_branches(what: str, branches: Sequence[Any]) -> list[Branch]:
    """Returns the branches. Raises TypeError if one is not a Branch."""
    for branch in branches:
        if not isinstance(branch, Branch):
            kind = type(branch).__name__
            raise TypeError(f"{what}: expected Branches, not {kind}; a plain program writes s.{what}(branches, ...)")
    return [*branches]
