"""The client, in a process of its own: raw HTTP/1.1 on one event loop; requests are encoded before timing starts.

    python -m bench.serve.client  < a line of JSON for each load (Work) > a line of JSON for each (Run)

The client must not be the bottleneck: a chunk of an answer costs it a few microseconds, and `Run.cpu` is its CPU time.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import defaultdict

import msgspec

from bench.serve.endpoint import Answer, Endpoint, clock
from bench.serve.loads import Ask, Load, make_load, segment_ids
from bench.serve.process import ClientProcess, work_off
from bench.serve.server import busy_seconds, idle_share


class Work(msgspec.Struct, frozen=True):
    """A load to run, and the server."""

    url: str
    model: str
    load: str
    scale: float
    seed: int
    repetition: int
    vocab_size: int
    api_key: str = ""
    """For requests without a tenant; a tenant's name is its API key."""
    timeout: float = 600.0
    """Limit for the load, in seconds."""

    @property
    def name(self) -> str:
        return self.load


class Run(msgspec.Struct):
    """The results of a load, as seen by the client; `answers` are in the order of its requests."""

    seconds: float = 0.0
    cpu: float = 0.0
    """CPU time of the client, in seconds."""
    gpu_idle: float | None = None
    """Share of the time in which the server's GPUs were idle; None if the server does not report it."""
    answers: list[Answer] = []
    error: str = ""
    """Why the run failed; the other fields are not valid then."""


# ---------------------------------------------------------------- a load


def bodies(work: Work, load: Load, asks: list[Ask]) -> list[bytes]:
    """The JSON body of each request. A segment is encoded once, for all prompts that contain it."""
    key = {"seed": work.seed, "repetition": work.repetition, "vocab_size": work.vocab_size}
    digits = [
        msgspec.json.encode(segment_ids(load.name, number, tokens, **key).tolist())[1:-1]
        for number, tokens in enumerate(load.segments)
    ]
    fields = {"model": work.model, "temperature": 0, "ignore_eos": True, "stream": True}
    options = msgspec.json.encode(fields | {"stream_options": {"include_usage": True}})[1:]
    return [
        b'{"prompt":[%b],"max_tokens":%d,%b' % (b",".join(digits[part] for part in ask.parts), ask.max_tokens, options)
        for ask in asks
    ]


async def run_asks(endpoint: Endpoint, asks: list[Ask], requests: list[bytes]) -> list[Answer]:
    """Send each request once the one before it has ended and its pause is over. The first failure cancels all."""
    answers: dict[int, Answer] = {}
    following = defaultdict(list)
    for number, ask in enumerate(asks):
        following[ask.after].append(number)

    async def follow(number: int) -> None:
        if pause := asks[number].pause:
            await asyncio.sleep(pause)
        answers[number] = await endpoint.post(requests[number])
        for child in following[number]:
            group.create_task(follow(child))

    async with asyncio.TaskGroup() as group:
        for number in following[None]:
            group.create_task(follow(number))
    return [answers[number] for number in range(len(asks))]


async def run_work(work: Work) -> Run:
    load = make_load(work.load, work.scale)
    endpoint = Endpoint(work.url)

    def written(asks: list[Ask]) -> list[bytes]:
        pairs = zip(asks, bodies(work, load, asks), strict=True)
        return [endpoint.request(body, ask.tenant or work.api_key) for ask, body in pairs]

    requests = written(load.asks)
    for ask, request in zip(load.prepare, written(load.prepare), strict=True):
        await run_asks(endpoint, [ask], [request])
    # A garbage collection during the run would count as the server's latency.
    gc.collect()
    gc.disable()
    try:
        # Read directly before and after the timed part: the server is idle while requests are encoded.
        busy = busy_seconds(work.url, work.api_key)
        began, cpu = clock(), time.process_time()
        async with asyncio.timeout(work.timeout):
            answers = await run_asks(endpoint, load.asks, requests)
        seconds, cpu = clock() - began, time.process_time() - cpu
        share = idle_share(busy, busy_seconds(work.url, work.api_key), seconds)
        return Run(seconds, cpu, share, answers)
    finally:
        gc.enable()
        endpoint.close()


class Client(ClientProcess[Run]):
    """Starts the client's process, and sends it loads."""

    def __init__(self) -> None:
        super().__init__("bench.serve.client", Run)


if __name__ == "__main__":
    work_off(run_work, Work, Run)
