"""Recorded sessions of agents, as turns with prompts, lengths of answers, and pauses. Needs nothing of radixrt.

kv_cache_tester      Claude Code: lengths, times, and hashes of blocks of 64 tokens, which are made token ids of
lmcache_agent_trace  mini-swe-agent, Magentic-One and tau-bench (or one of: miniswe, magagent, taubench): texts
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
BLOCK = 64
"""Tokens of a recorded block."""
LONGEST_PAUSE = 60.0
"""Of the recorded pauses, in seconds."""
TEXTS = ("miniswe", "magagent", "taubench")
TRACES = ("kv_cache_tester", "lmcache_agent_trace", *TEXTS)
CHARS_PER_TOKEN = 4
"""By which lengths of recorded texts are estimated."""


# ---------------------------------------------------------------- recorded blocks


def read_blocks(data: Path) -> list[dict[str, Any]]:
    """The sessions of kv_cache_tester, as they were recorded."""
    return read_lines(data / "kv_cache_tester" / "sessions.jsonl.gz")


def read_lines(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in file.read().split("\n") if line]


def is_sent(request: dict[str, Any]) -> bool:
    """Whether a recorded request has a prompt and an answer."""
    return bool(request["hash_runs"]) and bool(request["out"])


def block_numbers(request: dict[str, Any]) -> np.ndarray:
    """The numbers of a prompt's blocks, which are its session's own: shape (blocks,), int64."""
    return np.concatenate([np.arange(start, start + count) for start, count in request["hash_runs"]])


def system_prompt(recorded: dict[str, Any]) -> tuple[str, int]:
    """The name and the number of blocks of a session's system prompt; sessions in which tools and text of it are as
    long share it. Recorded numbers do not tell."""
    sizes = recorded["tool_tokens"], recorded["system_tokens"]
    return f"{sizes}", sum(sizes) // BLOCK


def block_ids(name: str, number: int, low: int, end: int, key: tuple[int, ...] = ()) -> np.ndarray:
    """The token ids of a block, in [low, end), determined by the arguments: shape (BLOCK,), int32."""
    return np.random.default_rng([*key, *name.encode(), number]).integers(low, end, BLOCK, dtype=np.int32)


# ---------------------------------------------------------------- sessions to replay


@dataclass(frozen=True, slots=True)
class BlockPrompt:
    """A prompt of recorded blocks, then `tail` tokens that no other prompt has. The first `shared` blocks are those of
    the system prompt `system`, the others those of its session."""

    session: str
    system: str
    shared: int
    runs: tuple[tuple[int, int], ...]
    """(first number, how many) of blocks that follow one another."""
    tail: int
    place: int
    """The number of the request in its session, subagents' counted from a million."""

    def numbers(self) -> list[int]:
        return [number for start, count in self.runs for number in range(start, start + count)]


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A recorded text."""

    text: str


Prompt = BlockPrompt | TextPrompt


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session, and what it waits for. Times in seconds."""

    prompt: Prompt
    max_tokens: int
    tokens: int
    """Of the prompt; of a text, about."""
    pause: float = 0.0
    """After the answer to the turn before."""
    interval: float = 0.0
    """After the turn before was sent, where nothing tells when it was answered."""
    lasted: float = 0.0
    """For how long the recorded answer took."""
    agents: tuple[tuple[Turn, ...], ...] = ()
    """Subagents that begin once this turn is answered; the next turn waits until they have ended."""


@dataclass(frozen=True, slots=True)
class Session:
    name: str
    turns: tuple[Turn, ...]

    def all_turns(self) -> Iterator[Turn]:
        for turn in self.turns:
            yield turn
            for agent in turn.agents:
                yield from agent

    def longest(self) -> int:
        """The most tokens of a prompt and its answer."""
        return max(turn.tokens + turn.max_tokens for turn in self.all_turns())

    def fitting(self, longest: int) -> Session:
        """The session up to the first turn that, with its answer, is longer than that; so are its subagents."""
        turns = (
            replace(turn, agents=tuple(short for agent in turn.agents if (short := _fitting(agent, longest))))
            for turn in _fitting(self.turns, longest)
        )
        return Session(self.name, tuple(turns))


def _fitting(turns: tuple[Turn, ...], longest: int) -> tuple[Turn, ...]:
    fits = [turn.tokens + turn.max_tokens <= longest for turn in turns]
    return turns[: fits.index(False)] if False in fits else turns


def read_sessions(traces: str, data: Path, longest: int, cut: bool = False) -> list[Session]:
    """Read sessions. Those with a turn of more than `longest` tokens, prompt and answer, are left out, or with `cut`
    end before it. Raises ValueError if none is left, FileNotFoundError without the data."""
    if traces == "kv_cache_tester":
        found = [_of_blocks(one) for one in read_blocks(data)]
    else:
        names = TEXTS if traces == "lmcache_agent_trace" else (traces,)
        found = [session for name in names for session in _of_texts(data / "lmcache_agent_trace", name)]
    if cut:
        found = [session.fitting(longest) for session in found]
    left = [session for session in found if session.turns and session.longest() <= longest]
    if not left:
        raise ValueError(f"no session of {traces} has at most {longest:,} tokens")
    return left


def _of_blocks(recorded: dict[str, Any]) -> Session:
    name, (system, shared) = recorded["id"], system_prompt(recorded)

    def turns(requests: list[dict[str, Any]], place: int) -> Iterator[Turn]:
        for number, request in enumerate(requests, place):
            if request["type"] != "subagent" and is_sent(request):
                runs = tuple((start, count) for start, count in request["hash_runs"])
                blocks = sum(count for _, count in runs)
                tail = max(0, request["in"] - blocks * BLOCK)
                yield Turn(
                    prompt=BlockPrompt(name, system, shared, runs, tail, number),
                    max_tokens=request["out"],
                    tokens=blocks * BLOCK + tail,
                    pause=min(LONGEST_PAUSE, request.get("think_time", 0.0)),
                    lasted=request.get("api_time", 0.0),
                )

    requests, main, agents = recorded["requests"], [], []
    for number, request in enumerate(requests):
        if request["type"] == "subagent":
            agents.append(tuple(turns(request["requests"], (number + 1) * 1_000_000)))
        elif is_sent(request):
            main += turns([request], number)
        if main and agents:
            main[-1] = replace(main[-1], agents=(*main[-1].agents, *(agent for agent in agents if agent)))
            agents = []
    return Session(name, tuple(main))


def _of_texts(folder: Path, name: str) -> list[Session]:
    calls: dict[str, list[dict[str, Any]]] = {}
    for call in read_lines(folder / f"{name}.jsonl.gz"):
        if call["input"] and call["output"]:
            calls.setdefault(call["session_id"], []).append(call)
    return [Session(f"{name}/{session}", tuple(_text_turns(of_it))) for session, of_it in calls.items()]


def _text_turns(calls: list[dict[str, Any]]) -> Iterator[Turn]:
    before = calls[0]["timestamp"]
    for call in calls:
        yield Turn(
            prompt=TextPrompt(call["input"]),
            max_tokens=max(1, len(call["output"]) // CHARS_PER_TOKEN),
            tokens=len(call["input"]) // CHARS_PER_TOKEN,
            interval=min(LONGEST_PAUSE, max(0.0, (call["timestamp"] - before) / 1e6)),
        )
        before = call["timestamp"]
