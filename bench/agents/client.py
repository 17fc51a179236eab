"""The client, in a process of its own: agents that replay sessions, closed loop, in a window of time.

    python -m bench.agents.client  < a line of JSON for each run (Work) > a line of JSON for each (Run)

An agent plays one session after the other. The first one it begins in the middle: at a random share of the session's
time, after all agents have sent the turn before with one token to generate, and have been answered. A turn is sent when
the one before it has been answered, its subagents have ended and its pause is over. When the window ends nothing more
is sent, and what is in flight may end.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench.agents.prompts import InfiniteCache, Writer, encoded, size
from bench.agents.sessions import BlockPrompt, Session, Turn, read_sessions
from bench.serve.endpoint import Answer, Endpoint, RunFailed, clock
from bench.serve.process import ClientProcess, work_off
from bench.serve.server import busy_seconds, idle_share

AFTER_ERROR = 1.0
"""Seconds until an agent whose session failed begins the next one: a server that refuses everything is not flooded."""


class Work(msgspec.Struct, frozen=True):
    """What to replay, and the server."""

    url: str
    model: str
    traces: str
    data: str
    agents: int
    seconds: float
    """The window in which requests are sent and counted."""
    grace: float
    """For how long requests in flight may go on after the window."""
    seed: int
    """Of the sessions' order and where they begin."""
    salt: int
    """Of the prompts, so that nothing is cached of an earlier run."""
    vocab_size: int
    longest: int
    """The most tokens of a prompt and its answer."""
    cut: bool
    """Whether longer sessions end before; otherwise they are left out."""
    start: tuple[float, float]
    """Between which shares of their time the first sessions begin."""
    api_key: str = ""
    timeout: float = 600.0
    """For a request, in seconds."""

    @property
    def name(self) -> str:
        return f"{self.agents} agents"


class Request(msgspec.Struct):
    """A request that was sent in the window. Sizes are in tokens, of texts in characters."""

    size: int
    known: int
    """Of the prompt, what a cache of unlimited size would have had."""
    max_tokens: int
    continues: bool
    """Whether a turn of the same session, or of the same subagent, was sent before."""
    in_tokens: bool
    answer: Answer | None = None
    error: str = ""
    """Neither: it had not ended when the run was over."""


class Run(msgspec.Struct):
    """The results of a run, as seen by the client."""

    seconds: float = 0.0
    """The window."""
    began: float = 0.0
    """When it began, by the clock of the answers."""
    warm_seconds: float = 0.0
    """For how long the warm-up took."""
    sessions: int = 0
    """Sessions that were begun."""
    cpu: float = 0.0
    """CPU time of the client in the window, in seconds."""
    gpu_idle: float | None = None
    """Share of the window in which the server's GPUs were idle; None if the server does not report it."""
    requests: list[Request] = []
    error: str = ""
    """Why the run failed; the other fields are not valid then."""


@dataclass(frozen=True, slots=True)
class Play:
    """One play of a session."""

    session: Session
    writer: Writer


@dataclass(frozen=True, slots=True)
class Start:
    """Where a play begins: at turn `turn`, `wait` seconds after the window does."""

    turn: int = 0
    wait: float = 0.0


def start_at(session: Session, share: float) -> Start:
    """The first turn at or after a share of the session's time, in which pauses are as long as they will be."""
    times = [0.0]
    for before, turn in zip(session.turns, session.turns[1:], strict=False):
        times.append(times[-1] + max(before.lasted + turn.pause, turn.interval))
    at = share * times[-1]
    turn = next(number for number, begins in enumerate(times) if begins >= at)
    return Start(turn, times[turn] - at)


class Agents:
    """All agents of a run."""

    def __init__(self, work: Work, sessions: list[Session], endpoint: Endpoint) -> None:
        self._work, self._endpoint = work, endpoint
        self._sessions = random.Random(work.seed).sample(sessions, len(sessions))
        self._played = 0
        self._sent = InfiniteCache()
        self._in_flight: set[asyncio.Task[Request]] = set()
        self.requests: list[Request] = []

    async def run(self) -> Run:
        """Warm up, then run for the window. Raises RunFailed if the warm-up fails."""
        draw = random.Random(self._work.seed)
        plays = [await self._next_play() for _ in range(self._work.agents)]
        starts = [start_at(play.session, draw.uniform(*self._work.start)) for play in plays]
        begun = clock()
        await self._warm_up(plays, starts)
        warm_seconds = clock() - begun
        # A garbage collection during the run would count as the server's latency.
        gc.collect()
        gc.disable()
        try:
            busy = await self._busy_seconds()
            began, cpu = clock(), time.process_time()
            agents = [asyncio.create_task(self._agent(*pair)) for pair in zip(plays, starts, strict=True)]
            await asyncio.wait(agents, timeout=self._work.seconds, return_when=asyncio.FIRST_EXCEPTION)
            seconds, cpu = clock() - began, time.process_time() - cpu
            await _cancelled(agents)
            idle = idle_share(busy, await self._busy_seconds(), seconds)
            if self._in_flight:
                await asyncio.wait(self._in_flight, timeout=self._work.grace)
            await _cancelled(list(self._in_flight))
        finally:
            gc.enable()
        return Run(seconds, began, warm_seconds, self._played, cpu, idle, self.requests)

    async def _busy_seconds(self) -> list[float] | None:
        return await asyncio.to_thread(busy_seconds, self._work.url, self._work.api_key)

    async def _next_play(self) -> Play:
        number = self._played
        self._played += 1
        session = self._sessions[number % len(self._sessions)]
        again = number // len(self._sessions)
        writer = Writer(session.name, again, self._work.salt, self._work.vocab_size)
        await writer.prepare(session)
        return Play(session, writer)

    async def _warm_up(self, plays: list[Play], starts: list[Start]) -> None:
        pairs = [
            (play, play.session.turns[start.turn - 1]) for play, start in zip(plays, starts, strict=True) if start.turn
        ]
        found = await asyncio.gather(*(self._ask(play, turn, False, max_tokens=1) for play, turn in pairs))
        self.requests.clear()
        if failed := [request.error for request in found if request.error]:
            raise RunFailed(f"{len(failed)} of {len(found)} requests of the warm-up failed, the first with {failed[0]}")

    async def _agent(self, play: Play, start: Start) -> None:
        while True:
            if not await self._session(play, start):
                await asyncio.sleep(AFTER_ERROR)
            play, start = await self._next_play(), Start()

    async def _session(self, play: Play, start: Start) -> bool:
        """Play a session. Returns whether nothing failed."""
        await asyncio.sleep(start.wait)
        return await self._turns(play, play.session.turns[start.turn :], begun=start.turn > 0)

    async def _turns(self, play: Play, turns: tuple[Turn, ...], begun: bool) -> bool:
        """Send one turn after the other, and their subagents' beside them. Ends at the first failure."""
        for number, turn in enumerate(turns):
            sent = clock()
            request = await self._request(self._ask(play, turn, begun or number > 0))
            if request.error:
                return False
            beside = [self._turns(play, agent, begun=False) for agent in turn.agents]
            if number + 1 < len(turns):
                following = turns[number + 1]
                pause = max(following.pause, sent + following.interval - clock())
                beside.append(_slept(pause))
            await asyncio.gather(*beside)
        return True

    async def _request(self, asking: Coroutine[Any, Any, Request]) -> Request:
        """Send a request in a task of its own, which goes on if the agent is cancelled."""
        task = asyncio.create_task(asking)
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)
        return await asyncio.shield(task)

    async def _ask(self, play: Play, turn: Turn, continues: bool, max_tokens: int | None = None) -> Request:
        pieces = play.writer.pieces(turn.prompt)
        most = max_tokens or turn.max_tokens
        known, total = self._sent.add(pieces), sum(map(size, pieces))
        request = Request(total, known, most, continues, isinstance(turn.prompt, BlockPrompt))
        self.requests.append(request)
        try:
            async with asyncio.timeout(self._work.timeout):
                request.answer = await self._endpoint.post(self._written(encoded(pieces), most))
        except TimeoutError:
            request.error = f"timeout: no answer in {self._work.timeout:g} s"
        except RunFailed as error:
            request.error = str(error)
        except OSError as error:
            request.error = f"{type(error).__name__}: {error}"
        return request

    def _written(self, prompt: bytes, max_tokens: int) -> bytes:
        fields = {"model": self._work.model, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
        body = b'{"prompt":%b,%b' % (prompt, msgspec.json.encode(fields)[1:])
        return self._endpoint.request(body, self._work.api_key)


async def _slept(seconds: float) -> bool:
    await asyncio.sleep(seconds)
    return True


async def _cancelled(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


async def run_work(work: Work) -> Run:
    endpoint = Endpoint(work.url)
    try:
        sessions = read_sessions(work.traces, Path(work.data), work.longest, work.cut)
        return await Agents(work, sessions, endpoint).run()
    finally:
        endpoint.close()


class AgentClient(ClientProcess[Run]):
    """Starts the client's process, and sends it runs."""

    def __init__(self) -> None:
        super().__init__("bench.agents.client", Run)


if __name__ == "__main__":
    work_off(run_work, Work, Run)
