"""CPU time that the DSL adds per branch: a program of 5 x 5 x 5 branches, and the same requests by the client alone.
And the cost of a step of a program with a long history: with a state at the server, and with everything sent every
time.

    python -m bench.lang [--quick]

Each of the 156 branches appends a text and generates 8 tokens; the workers are fakes, in threads of this process, over
ZMQ. Only the CPU time of the client's thread counts, not that of workers and router. The reference, in the same run,
sends the same requests by AsyncClient.generate, with one task per branch, and builds the prompts itself. With roles, it
sends chat messages, while the DSL has the server render them first, to keep generated ids. Before anything is timed,
both must have got the same texts, from prompts of the same lengths.

A step after a history of 40,000 tokens appends a line and generates 8 tokens. The reference, in the same run, sends all
parts of the prompt, as a client without states must. Bytes are those of messages to the router; CPU time is that of the
client's thread, and that of client, router and worker together. Prompts must have the same length.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bench.common import save, table
from radixrt.client import AsyncClient
from radixrt.client.local import LocalStack
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.demo.checkpoint import make_checkpoint
from radixrt.lang import Branch, assistant, gen, program, trace, user
from radixrt.messages import ChatPrompt, Origin, PartsPrompt, Sampling, TextPrompt, TokenPrompt

FAN, DEPTH = 5, 3
BRANCHES = sum(FAN**depth for depth in range(DEPTH + 1))
SAMPLING = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
OPENING = "Consider the question again, and then go on: "
LIMIT = 300.0
"""The most microseconds per branch that the DSL may add."""

Answers = dict[str, tuple[str, int]]
"""Text and prompt tokens, by branch path."""


def line(path: str) -> str:
    """The text that a branch appends."""
    return f" branch {path} says: " if path else OPENING


# ---------------------------------------------------------------- as programs


@program
async def text_tree(s: Branch) -> Answers:
    return await _grow(s, lambda branch: (line(branch.path), gen("x", SAMPLING)))


@program
async def chat_tree(s: Branch) -> Answers:
    return await _grow(s, lambda branch: (user(line(branch.path)), assistant(gen("x", SAMPLING))))


@program
async def budget_tree(s: Branch) -> Answers:
    with s.budget(tokens=BRANCHES * 8 + 1, seconds=60):
        return await _grow(s, lambda branch: (line(branch.path), gen("x", SAMPLING)))


async def _grow(s: Branch, nodes: Callable[[Branch], tuple[Any, Any]]) -> Answers:
    branches = level = [s]
    for depth in range(DEPTH + 1):
        for branch in level:
            for node in nodes(branch):
                branch += node
        if depth < DEPTH:
            level = [child for branch in level for child in branch.fork(FAN)]
            branches = branches + level
    values = [await branch.value("x") for branch in branches]
    return {b.path: (v.text, v.usage.prompt_tokens) for b, v in zip(branches, values, strict=True)}


# ---------------------------------------------------------------- by the client alone


async def bare_text(client: AsyncClient) -> Answers:
    found: Answers = {}

    async def node(parts: list[Any], path: str, depth: int) -> None:
        parts = [*parts, TextPrompt(line(path), add_special_tokens=not parts)]
        done = await client.generate(PartsPrompt(parts), SAMPLING, origin=Origin("bare", path, depth))
        found[path] = done.text, done.usage.prompt_tokens
        parts.append(TokenPrompt(done.ids))
        await _below(node, parts, path, depth)

    await node([], "", 0)
    return found


async def bare_chat(client: AsyncClient) -> Answers:
    found: Answers = {}

    async def node(messages: list[Any], path: str, depth: int) -> None:
        messages = [*messages, {"role": "user", "content": line(path)}]
        done = await client.generate(ChatPrompt(messages), SAMPLING, origin=Origin("bare", path, depth))
        found[path] = done.text, done.usage.prompt_tokens
        messages.append({"role": "assistant", "content": done.text})
        await _below(node, messages, path, depth)

    await node([], "", 0)
    return found


async def _below(node: Callable[..., Awaitable[None]], said: list[Any], path: str, depth: int) -> None:
    if depth < DEPTH:
        paths = [f"{path}.{i}" if path else str(i) for i in range(FAN)]
        await asyncio.gather(*(node(said, below, depth + 1) for below in paths))


# ---------------------------------------------------------------- timing


async def check(client: AsyncClient) -> None:
    """Assert that the program and the reference do the same work."""
    bare = await bare_text(client)
    assert len(bare) == BRANCHES
    assert await text_tree(client) == bare and await budget_tree(client) == bare
    roles, chat = await chat_tree(client), await bare_chat(client)
    assert roles.keys() == chat.keys() and roles[""] == chat[""], "below, ids and their re-encoding may differ"


async def cpu_us(work: Callable[[], Awaitable[Any]]) -> float:
    """CPU microseconds of this thread per branch."""
    gc.collect()
    began = time.thread_time()
    await work()
    return (time.thread_time() - began) * 1e6 / BRANCHES


async def traced(client: AsyncClient) -> None:
    with trace():
        await text_tree(client)


async def measure(address: str, rounds: int) -> list[dict[str, Any]]:
    async with await AsyncClient.connect(address) as client:
        await check(client)
        kinds = {
            "text": (text_tree, bare_text),
            "roles": (chat_tree, bare_chat),
            "text, in a budget": (budget_tree, bare_text),
            "text, traced": (traced, bare_text),
        }
        times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        for _ in range(rounds):
            for kind, (with_dsl, alone) in kinds.items():  # in turns, so that both see the same noise
                dsl = await cpu_us(lambda f=with_dsl: f(client))
                times[kind].append((dsl, await cpu_us(lambda f=alone: f(client))))
    return [_row(kind, pairs) for kind, pairs in times.items()]


def _row(kind: str, pairs: list[tuple[float, float]]) -> dict[str, Any]:
    dsl, bare = (statistics.median(side) for side in zip(*pairs, strict=True))
    added = statistics.median(a - b for a, b in pairs)
    return {"branches of": kind, "DSL, us": dsl, "bare client, us": bare, "added, us": added, "limit, us": LIMIT}


# ---------------------------------------------------------------- a long history


HISTORY_TOKENS = 40_000
STEP = " Then the agent looked at file {}, and said: "


async def history_text(client: AsyncClient) -> str:
    """A text of about HISTORY_TOKENS tokens."""
    lines = "".join(f"Line {n}: the tool found {n * 7919 % 1000} of {n * 104729 % 9973}. " for n in range(200))
    return lines * round(HISTORY_TOKENS / len(await client.tokenize(lines)))


class Meter:
    """Measures the cost of steps: bytes of the client's messages, CPU time of its thread and of the process."""

    def __init__(self, client: AsyncClient) -> None:
        self._sent = 0
        socket = client._transport._socket
        self._send, socket.send = socket.send, self._count

    def _count(self, payload: bytes) -> bool:
        self._sent += len(payload)
        return self._send(payload)

    async def step(self, work: Callable[[], Awaitable[int]]) -> tuple[int, int, float, float]:
        """Run a step. Returns (prompt tokens, bytes, CPU us of the client's thread, CPU us of the process)."""
        before = self._sent, time.thread_time(), time.process_time()
        tokens = await work()
        after = self._sent, time.thread_time(), time.process_time()
        sent, own, everywhere = (b - a for a, b in zip(before, after, strict=True))
        return tokens, sent, own * 1e6, everywhere * 1e6


async def measure_steps(running: LocalStack, rounds: int) -> list[dict[str, Any]]:
    """Measure steps, alternating between a state at the server and everything sent."""
    async with await AsyncClient.connect(running.address) as client:
        text, meter = await history_text(client), Meter(client)
        parts: list[Any] = [TextPrompt(text)]
        found: dict[str, list[tuple[int, int, float, float]]] = {"on state": [], "everything sent": []}

        @program
        async def steps(s: Branch) -> None:
            s += text
            for number in itertools.count():
                if number > rounds:
                    return

                async def on_state() -> int:
                    nonlocal s
                    s += STEP.format(number)  # noqa: B023
                    s += gen("x", SAMPLING)
                    return (await s.value("x")).usage.prompt_tokens

                async def everything() -> int:
                    parts.append(TextPrompt(STEP.format(number), add_special_tokens=False))  # noqa: B023
                    if number == 0:  # noqa: B023
                        parts[:] = [TextPrompt(text + STEP.format(0))]
                    done = await client.generate(PartsPrompt(parts), SAMPLING)
                    parts.append(TokenPrompt(done.ids))
                    return done.usage.prompt_tokens

                pair = await meter.step(on_state), await meter.step(everything)
                assert pair[0][0] == pair[1][0], "both ask the same"
                if number:
                    for way, one in zip(found, pair, strict=True):
                        found[way].append(one)

        await steps(client)
    return [_step_row(way, one) for way, one in found.items()]


def _step_row(way: str, steps: list[tuple[int, int, float, float]]) -> dict[str, Any]:
    prompt, sent, own, everywhere = (statistics.median(side) for side in zip(*steps, strict=True))
    return {"a step": way, "prompt tokens": int(prompt), "bytes": int(sent), "client, us": own, "all, us": everywhere}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds, nothing is written")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder))
        names = {"model": folder, "served_model_name": "m"}
        stack = StackConfig(resolve(RouterConfig(**names)), WorkerConfig(**names, fake="0,0"), FrontendConfig())
        with LocalStack(stack) as running:
            rows = asyncio.run(measure(running.address, 3 if quick else 25))
            steps = asyncio.run(measure_steps(running, 5 if quick else 40))
    print(table(rows))
    print(table(steps))
    print(json.dumps({"ok": all(row["added, us"] < LIMIT for row in rows)}))
    if not quick:
        save("lang", rows, unit="CPU us a branch, client thread", branches=BRANCHES, steps=steps)


if __name__ == "__main__":
    main()
