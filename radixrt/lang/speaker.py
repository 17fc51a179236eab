"""Executes the nodes of a branch: adds text to its history, and makes the requests of gen and select, within a budget
and traced."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from radixrt.client import AsyncClient, CacheOutcome, Completion, ServerError
from radixrt.lang.budget import Budget, within
from radixrt.lang.errors import Site, Spent
from radixrt.lang.history import History
from radixrt.lang.nodes import Gen, Result, Role, Select
from radixrt.lang.session import Session
from radixrt.lang.steps import Run, Step
from radixrt.lang.values import Promise, Value
from radixrt.messages import GONE, TOKEN_BYTES, CacheAction, Origin, Sampling, StatePrompt

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Work:
    """A node that was appended, the program's line that did so, and the budget there."""

    node: Any
    site: Site
    promises: deque[Promise]
    """Of the node's gens and selects, in order."""
    budget: Budget | None


class Speaker:
    """Executes the nodes that are appended to one branch."""

    __slots__ = ("_client", "_origin", "_paused", "_run", "_session", "_told", "history")

    def __init__(self, client: AsyncClient, origin: Origin, run: Run | None, session: Session) -> None:
        self.history = History(session.scope)
        self._client = client
        self._origin = origin
        self._run = run
        self._session = session
        self._paused = 0
        """The state in which the branch waits for a tool; 0 if it does not."""
        self._told: asyncio.Future[None] | None = None
        """Done when the server has read that."""

    async def say(self, work: Work) -> None:
        """Execute a node. Raises ServerError; ValueError if the chat does not allow it; Spent if the budget is
        spent."""
        match work.node:
            case str() as text:
                self._add_text(text, work)
            case Result():
                self.history.add_result(work.node)
                self._note("tool", work.node.content, work)
            case Role(role, parts):
                texts = [part for part in parts if isinstance(part, str)]
                if len(texts) < len(parts):
                    await self._add_turn(parts, work)
                else:
                    self.history.add_message(role, "".join(texts))
                    self._note(role, "".join(texts), work)
            case node if self.history.has_roles:
                await self._add_turn((node,), work)
            case Gen(name=name, tools=[_, *_]):
                raise ValueError(f"gen {name!r}: tools are for chats: write assistant(gen({name!r}, tools=...))")
            case node:
                await self._fill(node, work)

    async def _add_turn(self, parts: Sequence[str | Gen | Select], work: Work) -> None:
        """A message of the assistant."""
        for part in parts:
            if isinstance(part, Gen) and part.tools is not None:
                self.history.use_tools(list(part.tools))
        self.history.open_message()
        for part in parts:
            if isinstance(part, str):
                self._add_text(part, work, "assistant")
            else:
                await self._fill(part, work)
        self.history.close_message()

    def _add_text(self, text: str, work: Work, role: str = "") -> None:
        self.history.say(text)
        self._note(role, text, work)

    def _note(self, role: str, text: str, work: Work) -> None:
        if self._run is not None:
            self._run.begin(self._origin.branch, "text", role, work.site, text)

    async def _fill(self, node: Gen | Select, work: Work) -> None:
        """Compute the value of a gen or select, and fulfil its promise, which is the first one left."""
        with self._traced(node, work.site) as step:
            if isinstance(node, Gen):
                value = await self._generate(node, work.promises[0], work.budget, step)
            else:
                async with within(work.budget):
                    value = await self._select(node)
            if step is not None:
                step.usage, step.finish, step.said = value.usage, value.finish, value.text
        work.promises.popleft().keep(value)

    def _traced(self, node: Gen | Select, site: Site) -> contextlib.AbstractContextManager[Step | None]:
        if self._run is None:
            return contextlib.nullcontext()
        return self._run.timed(self._origin.branch, "gen" if isinstance(node, Gen) else "select", node.name, site)

    # ------------------------------------------------------------ states

    async def fork(self, count: int) -> None:
        """Let the server keep the state, for `count` branches that continue it. A single one needs no message."""
        if count > 1:
            prompt = await self._prompt()
            await self._session.fork(prompt, count)
            self.history.keep(prompt.save)

    def pause(self, seconds: float | None) -> None:
        """Tell the server that the branch makes no request for a while, for at most `seconds`."""
        state = self.history.state
        if state and state != self._paused:
            self._paused, self._told = state, self._session.pause(state, seconds)

    async def hint(self, action: CacheAction) -> CacheOutcome:
        """Give the server's cache a hint for the branch's state."""
        if not self.history.state:
            return CacheOutcome("missing", reason="nothing was generated here yet")
        if self._told is not None:
            await asyncio.shield(self._told)
        try:
            return await self._client.hint(action, StatePrompt(self._session.scope, self.history.state))
        except ServerError as problem:
            if problem.code != GONE:
                raise
            return CacheOutcome("missing", reason=problem.message)

    async def _request(self, send: Callable[[StatePrompt], Awaitable[T]]) -> tuple[T, int]:
        """Send what is new or, if the server has forgotten the state, everything. Returns the reply, and the number of
        the new state."""
        prompt = await self._prompt()
        try:
            return await send(prompt), prompt.save
        except ServerError as problem:
            if problem.code != GONE:
                raise
        return await send(self.history.whole(prompt.save)), prompt.save

    async def _prompt(self) -> StatePrompt:
        """A prompt of what is new, to be kept under a new number. Waits until the server has read a Pause or Fork."""
        if self._told is not None:
            await asyncio.shield(self._told)
            self._told = None
        resumes = self.history.state != 0 and self.history.state == self._paused
        self._paused = 0
        return self.history.prompt(self._session.number(), resumes)

    async def _generate(self, node: Gen, promise: Promise, budget: Budget | None, step: Step | None) -> Value:
        async def send(prompt: StatePrompt) -> Completion:
            if budget is None and step is None and not promise.streams:
                return await self._client.generate(prompt, node.sampling, origin=self._origin)
            return await self._stream(node.sampling, prompt, promise, budget, step)

        done, state = await self._request(send)
        self.history.add_answer(done, node.sampling, state)
        return Value(
            done.text,
            done.token_ids,
            done.finish,
            done.usage,
            done.logprobs,
            schema=node.schema,
            message=done.message,
        )

    async def _stream(
        self, sampling: Sampling, prompt: StatePrompt, promise: Promise, budget: Budget | None, step: Step | None
    ) -> Completion:
        """Generate by a stream, to charge a budget, to time the first token, or to pass text on."""
        whole = Completion()
        try:
            async with within(budget):
                allowed = sampling if budget is None else budget.clamp(sampling)
                async for delta in self._client.stream(prompt, allowed, origin=self._origin):
                    if step is not None and self._run is not None and step.first is None and delta.ids:
                        step.first = self._run.now()
                    if budget is not None:
                        budget.charge(len(delta.ids) // TOKEN_BYTES)
                    whole.add(delta)
                    if delta.text and promise.streams:
                        promise.add_piece(delta.text)
            tokens = len(whole.ids) // TOKEN_BYTES
            if budget is not None and allowed is not sampling:
                if whole.finish == "length" and tokens == allowed.max_tokens:
                    raise budget.spent()
        except Spent as spent:
            spent.text = whole.text
            raise
        return whole

    async def _select(self, node: Select) -> Value:
        space = self.history.take_space()
        texts = [space + choice for choice in node.choices]
        scored, state = await self._request(lambda prompt: self._client.score(prompt, texts, origin=self._origin))
        scores = {
            choice: sum(logprobs) / (len(logprobs) if node.per_token else 1)
            for choice, logprobs in zip(node.choices, scored.logprobs, strict=True)
        }
        best = max(node.choices, key=scores.__getitem__)
        self.history.add_choice(space + best, state)
        return Value(best, [], "stop", scored.usage, scores=scores)
