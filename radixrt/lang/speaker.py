"""Works off the nodes of a branch: text into its history, a gen or select by a request, within a budget, traced."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from radixrt.client import AsyncClient, Completion, ServerError
from radixrt.lang.budget import Budget, within
from radixrt.lang.errors import Site, Spent
from radixrt.lang.history import History
from radixrt.lang.nodes import Gen, Role, Select
from radixrt.lang.session import Session
from radixrt.lang.trace import Run, Step
from radixrt.lang.values import Promise, Value
from radixrt.messages import GONE, TOKEN_BYTES, Delta, Origin, Sampling, StatePrompt, Usage

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Work:
    """A node that was appended: by which line, under which budget, and what was promised of it."""

    node: Any
    site: Site
    promises: deque[Promise]
    """Of the node's gens and selects, in their order."""
    budget: Budget | None


class Speaker:
    """Says for one branch what is appended to it."""

    __slots__ = ("_client", "_origin", "_paused", "_run", "_session", "_told", "history")

    def __init__(self, client: AsyncClient, origin: Origin, run: Run | None, session: Session) -> None:
        self.history = History(session.scope)
        self._client = client
        self._origin = origin
        self._run = run
        self._session = session
        self._paused = 0
        """The state in which the session waits for a tool; 0: it does not."""
        self._told: asyncio.Future[None] | None = None
        """Done when the server knows that."""

    async def say(self, work: Work) -> None:
        """Do a node. ServerError; ValueError where the chat does not allow it; Spent when the budget was, or came, to
        its end."""
        match work.node:
            case str() as text:
                self._add_text(text, work)
            case Role(role, parts) if all(isinstance(part, str) for part in parts):
                text = "".join(parts)
                self.history.add_message(role, text)
                self._note(role, text, work)
            case Role(_, parts):
                await self._add_turn(parts, work)
            case node if self.history.has_roles:
                await self._add_turn((node,), work)
            case node:
                await self._fill(node, work)

    async def _add_turn(self, parts: Sequence[str | Gen | Select], work: Work) -> None:
        """A message of the assistant."""
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
        """Make the value of the first promise and keep it."""
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
        """Have the server keep what was said, for branches that go on from here. One alone needs nothing."""
        if count > 1:
            prompt = await self._prompt()
            await self._session.fork(prompt, count)
            self.history.keep(prompt.save)

    def pause(self, seconds: float | None) -> None:
        """Nothing will be asked for a while, for so many seconds at most."""
        state = self.history.state
        if state and state != self._paused:
            self._paused, self._told = state, self._session.pause(state, seconds)

    async def _ask(self, ask: Callable[[StatePrompt], Awaitable[T]]) -> tuple[T, int]:
        """The answer to what is new, or to everything if the server has forgotten the state; and the new state."""
        prompt = await self._prompt()
        try:
            return await ask(prompt), prompt.save
        except ServerError as problem:
            if problem.code != GONE:
                raise
        return await ask(self.history.whole(prompt.save)), prompt.save

    async def _prompt(self) -> StatePrompt:
        """What is new, to be kept under a new number."""
        if self._told is not None:
            await asyncio.shield(self._told)
            self._told = None
        resumes = self.history.state != 0 and self.history.state == self._paused
        self._paused = 0
        return self.history.prompt(self._session.number(), resumes)

    async def _generate(self, node: Gen, promise: Promise, budget: Budget | None, step: Step | None) -> Value:
        async def ask(prompt: StatePrompt) -> Completion:
            if budget is None and step is None and not promise.streams:
                return await self._client.generate(prompt, node.sampling, origin=self._origin)
            return await self._follow(node.sampling, prompt, promise, budget, step)

        done, state = await self._ask(ask)
        self.history.add_answer(done, node.sampling, state)
        return Value(done.text, done.token_ids, done.finish, done.usage, done.logprobs, schema=node.schema)

    async def _follow(
        self, sampling: Sampling, prompt: StatePrompt, promise: Promise, budget: Budget | None, step: Step | None
    ) -> Completion:
        """Generate token by token."""
        whole = Completion()
        try:
            async with within(budget):
                allowed = sampling if budget is None else budget.clamp(sampling)
                async for delta in self._client.stream(prompt, allowed, origin=self._origin):
                    if step is not None and step.first is None and delta.ids:
                        step.first = self._run.now()
                    if budget is not None:
                        budget.charge(len(delta.ids) // TOKEN_BYTES)
                    _add(whole, delta)
                    if delta.text and promise.streams:
                        promise.add_piece(delta.text)
            tokens = len(whole.ids) // TOKEN_BYTES
            if allowed is not sampling and whole.finish == "length" and tokens == allowed.max_tokens:
                raise budget.spent()
        except Spent as spent:
            spent.text = whole.text
            raise
        return whole

    async def _select(self, node: Select) -> Value:
        scored, state = await self._ask(lambda prompt: self._client.score(prompt, node.choices, origin=self._origin))
        scores = {
            choice: sum(found) / (len(found) if node.per_token else 1)
            for choice, found in zip(node.choices, scored.logprobs, strict=True)
        }
        best = max(node.choices, key=scores.__getitem__)
        self.history.add_choice(best, state)
        return Value(best, [], "stop", scored.usage, scores=scores)


def _add(whole: Completion, delta: Delta) -> None:
    whole.text += delta.text
    whole.ids += delta.ids
    if delta.logprobs:
        whole.logprobs = (whole.logprobs or []) + delta.logprobs
    if delta.finish is not None:
        whole.finish, whole.stop, whole.usage = delta.finish, delta.stop, delta.usage or Usage()
