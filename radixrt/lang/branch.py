"""A branch of a running program: nodes go in, values come out, one task works them off."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from radixrt.client import AsyncClient, Completion
from radixrt.lang.errors import ProgramError, Site
from radixrt.lang.history import History
from radixrt.lang.nodes import Gen, Node, Role, Select
from radixrt.lang.schema import parse
from radixrt.messages import Origin, PartsPrompt, TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class Value:
    """What a gen or select gave. `scores` are a select's, by choice, as natural log-probabilities; `schema` is a gen's,
    as the program gave it."""

    text: str
    token_ids: list[int]
    finish: str
    usage: Usage
    logprobs: list[TokenLogprob] | None = None
    scores: dict[str, float] | None = None
    schema: Any = None

    def parse(self) -> Any:
        """The JSON of a `gen(schema=...)`, as an object of the type that was its schema, else as plain Python.
        ValueError for text that was cut off."""
        return parse(self.text, self.schema)


@dataclass(frozen=True, slots=True)
class _Fork:
    children: tuple[Branch, ...]


class _Promise:
    """Of one gen or select: a name may be used again before the one before it is done."""

    __slots__ = ("_grown", "pieces", "streams", "value")

    def __init__(self, streams: bool) -> None:
        self.value: asyncio.Future[Value] = asyncio.get_running_loop().create_future()
        self.value.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody has to ask for it
        self.streams = streams
        self.pieces: list[str] = []
        """Text of a gen that streams, kept so that every reader gets all of it."""
        self._grown = asyncio.Event()

    def add_piece(self, text: str) -> None:
        self.pieces.append(text)
        self._wake()

    def keep(self, value: Value) -> None:
        self.value.set_result(value)
        self._wake()

    def fail(self, problem: ProgramError) -> None:
        if not self.value.done():
            self.value.set_exception(problem)
            self._wake()

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()

    async def grown(self) -> None:
        """Return when there is a new piece, or the value."""
        await self._grown.wait()


@dataclass(frozen=True, slots=True)
class _Work:
    node: Node | _Fork
    site: Site
    promises: deque[_Promise]
    """Of the node's gens and selects, in their order."""


class Branch:
    """One line of thought. `s += node` appends and never waits; `await s[name]` is the text of a gen or select.

    Branches are made by a program and by `fork`. `path` is the way from the root ("0.2": third fork of the first),
    `depth` the number of forks above it.
    """

    def __init__(self, client: AsyncClient, program: str, site: Site, path: str = "", depth: int = 0) -> None:
        self.path = path
        self.depth = depth
        self._client = client
        self._origin = Origin(program, path, depth)
        self._history = History()
        self._promises: dict[str, _Promise] = {}
        """The latest of each name."""
        self._queue: deque[_Work] = deque()
        self._task: asyncio.Task[None] | None = None
        self._started = asyncio.Event()
        """Set when the parent has come to the fork."""
        if not path:
            self._started.set()
        self._failure: ProgramError | None = None
        self.cancelled = False
        """`cancel` was called: nothing more is done here."""
        self._site = site
        self._children: list[Branch] = []

    # ------------------------------------------------------------ in

    def __iadd__(self, node: Node) -> Self:
        self._append(node, Site.of(sys._getframe(1)))
        return self

    def fork(self, count: int = 2) -> list[Branch]:
        """Branches that begin with all that was appended here so far. Their common part is computed once.

        ValueError for a count below 1."""
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
        child = Branch(self._client, self._origin.program, site, path, self.depth + 1)
        child._promises = dict(self._promises)
        return child

    def _append(self, node: Node | _Fork, site: Site) -> None:
        promises: deque[_Promise] = deque()
        for part in node.parts if isinstance(node, Role) else (node,):
            if isinstance(part, Gen | Select):
                promises.append(self._promise(part))
            elif not isinstance(part, str | _Fork):
                raise TypeError(f"expected text, gen, select or a role, not {type(part).__name__}")
        self._queue.append(_Work(node, site, promises))
        self._start()

    def _promise(self, node: Gen | Select) -> _Promise:
        promise = self._promises[node.name] = _Promise(isinstance(node, Gen) and node.stream)
        return promise

    # ------------------------------------------------------------ out

    def __getitem__(self, name: str) -> Awaitable[str]:
        """The text of the latest gen or select of that name. KeyError if there is none; ProgramError if it failed."""
        return _Text(self._latest(name).value)

    async def value(self, name: str) -> Value:
        """All that is known of it; errors as of `s[name]`."""
        return await asyncio.shield(self._latest(name).value)

    async def parse(self, name: str) -> Any:
        """`Value.parse` of the latest; errors as of `s[name]`, and ValueError for text that was cut off."""
        return (await self.value(name)).parse()

    def _latest(self, name: str) -> _Promise:
        if name not in self._promises:
            known = ", ".join(self._promises) or "none"
            raise KeyError(f"no gen or select {name!r} was appended to this branch ({known})")
        return self._promises[name]

    async def stream(self, name: str) -> AsyncIterator[str]:
        """Text of a `gen(name, stream=True)` as it comes; whoever comes late gets all of it too.

        KeyError and ProgramError as of `s[name]`; ValueError for a gen that does not stream."""
        promise = self._latest(name)
        if not promise.streams:
            raise ValueError(f"{name!r} was not appended as gen({name!r}, stream=True)")
        at = 0
        while at < len(promise.pieces) or not promise.value.done():
            if at == len(promise.pieces):
                await promise.grown()
            for piece in promise.pieces[at:]:
                at += 1
                yield piece
        await asyncio.shield(promise.value)

    async def wait(self) -> Self:
        """Return when everything appended so far has been done. ProgramError if something failed or was cancelled."""
        await self._started.wait()
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])
        if self._failure is not None:
            raise self._failure
        return self

    # ------------------------------------------------------------ the task

    def _start(self) -> None:
        if self._started.is_set() and self._queue and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._work_off(), name=f"branch {self.path}")

    def _begin(self, history: History | None, failure: ProgramError | None = None) -> None:
        """The parent has come to the fork, or has failed before."""
        if self.cancelled:
            return
        self._history = history or self._history
        self._failure = failure
        self._started.set()
        self._start()

    async def _work_off(self) -> None:
        while self._queue:
            work = self._queue.popleft()
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

    def _fail(self, site: Site, problem: BaseException) -> None:
        self._failure = ProgramError(site, self.path, problem)
        self._failure.__cause__ = problem

    def _give_up(self, work: _Work) -> None:
        """Pass the failure on to all who wait for this."""
        for promise in work.promises:
            promise.fail(self._failure)
        for child in work.node.children if isinstance(work.node, _Fork) else ():
            child._begin(None, self._failure)

    async def _do(self, work: _Work) -> None:
        match work.node:
            case str() as text:
                self._history.say(text)
            case Role(role, parts) if all(isinstance(part, str) for part in parts):
                self._history.add_message(role, "".join(parts))
            case Role(_, parts):
                await self._speak(parts, work.promises)
            case Gen() | Select() as node if self._history.has_roles:
                await self._speak((node,), work.promises)
            case Gen() | Select() as node:
                await self._fill(node, work.promises)
            case _Fork(children):
                for child in children:
                    child._begin(self._history.copy())

    async def _speak(self, parts: Sequence[str | Gen | Select], promises: deque[_Promise]) -> None:
        """A message of the assistant."""
        self._history.open_message()
        for part in parts:
            if isinstance(part, str):
                self._history.say(part)
            else:
                await self._fill(part, promises)
        self._history.close_message()

    async def _fill(self, node: Gen | Select, promises: deque[_Promise]) -> None:
        """Make the value of the first promise and keep it."""
        value = await (self._generate(node, promises[0]) if isinstance(node, Gen) else self._select(node))
        promises.popleft().keep(value)

    async def _generate(self, node: Gen, promise: _Promise) -> Value:
        prompt = await self._history.prompt(self._client)
        if promise.streams:
            done = await self._follow(node, prompt, promise)
        else:
            done = await self._client.generate(prompt, node.sampling, origin=self._origin)
        await self._history.add_generated(self._client, done, node.sampling)
        return Value(done.text, done.token_ids, done.finish, done.usage, done.logprobs, schema=node.schema)

    async def _follow(self, node: Gen, prompt: PartsPrompt, promise: _Promise) -> Completion:
        whole = Completion()
        async for delta in self._client.stream(prompt, node.sampling, origin=self._origin):
            whole.text += delta.text
            whole.ids += delta.ids
            if delta.logprobs:
                whole.logprobs = (whole.logprobs or []) + delta.logprobs
            if delta.finish is not None:
                whole.finish, whole.stop, whole.usage = delta.finish, delta.stop, delta.usage or Usage()
            if delta.text:
                promise.add_piece(delta.text)
        return whole

    async def _select(self, node: Select) -> Value:
        prompt = await self._history.prompt(self._client)
        scored = await self._client.score(prompt, node.choices, origin=self._origin)
        scores = {
            choice: sum(found) / (len(found) if node.per_token else 1)
            for choice, found in zip(node.choices, scored.logprobs, strict=True)
        }
        best = max(node.choices, key=scores.__getitem__)
        self._history.add_chosen(best)
        return Value(best, [], "stop", scored.usage, scores=scores)

    # ------------------------------------------------------------ the end

    def family(self) -> Iterator[Branch]:
        """This branch and all below it, parents first."""
        found = deque([self])
        while found:
            branch = found.popleft()
            yield branch
            found.extend(branch._children)

    async def cancel(self) -> None:
        """Stop this branch and all below it: their requests are cancelled at the server, and whoever waits for a value
        of theirs gets a ProgramError. The rest of the program goes on."""
        family = list(self.family())
        for branch in family:
            branch.cancelled = True
        tasks = [branch._task for branch in family if branch._task is not None]
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            for branch in family:
                branch._end()

    def _end(self) -> None:
        """Leave nobody waiting: the task is gone, or has never run."""
        if self._failure is None:
            self._fail(self._site, asyncio.CancelledError())
        while self._queue:
            self._give_up(self._queue.popleft())
        self._started.set()


class _Text:
    """Awaits a value's text, any number of times."""

    __slots__ = ("_future",)

    def __init__(self, future: asyncio.Future[Value]) -> None:
        self._future = future

    def __await__(self) -> Generator[Any, None, str]:
        value = yield from asyncio.shield(self._future).__await__()
        return value.text


async def join(*branches: Branch) -> list[Branch]:
    """Wait until all that was appended to these branches is done: the branches. ProgramError of the first that failed
    or was cancelled."""
    await asyncio.gather(*(branch.wait() for branch in branches))
    return list(branches)
