"""What agents do, as jobs with answers that can be compared: generation and streams over ZMQ and HTTP, sessions over
several turns, programs with forks, scores, cancels, grammars, of several tenants."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from radixrt import Branch, assistant, gen, program, select, system, user
from radixrt.client import AsyncClient, ServerError, token_list
from radixrt.lang import ProgramError
from radixrt.messages import Grammar, Origin, Sampling, Usage
from radixrt.worker.execution.fake_runner import fake_token
from tests.chaos.stack import Serve

VOCAB = 2048
ATTEMPT_SECONDS = 60.0
"""An attempt that has neither an answer nor an error by then hangs."""
MAX_ATTEMPTS = 60
RETRIED = {429, 503}
"""Statuses that ask to try again. Any other error fails the run."""
LOST = "workers were lost while they served this request"
"""A request that several workers have not survived fails for good, with 500: in a storm that may be by chance."""
RETRY_SECONDS = 0.25
GREEDY = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)
TEXT = Sampling(max_tokens=24, temperature=0.0)
WORDS = "mill tower river lantern copper garden winter letter harbor violet engine shadow".split()


@dataclass(slots=True)
class Tally:
    """What was done so far, for the table at the end of the run."""

    done: Counter[str] = field(default_factory=Counter)
    """Jobs that were answered, by kind."""
    retries: Counter[str] = field(default_factory=Counter)
    """Attempts that ended with an error that asks to try again, by its text."""
    tokens: int = 0
    """Tokens, or characters where only text is known, that were compared."""
    failures: list[str] = field(default_factory=list)


class Site:
    """Clients of a stack: for each tenant over ZMQ, over HTTP in the native format, and over HTTP as OpenAI's."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self.tally = Tally()
        self.zmq: dict[str, AsyncClient] = {}
        self.native: dict[str, AsyncClient] = {}
        self.web: dict[str, httpx.AsyncClient] = {}
        self.numbers = itertools.count()
        """Unique numbers, for namespaces that nobody has used."""

    async def __aenter__(self) -> Self:
        for tenant, key in self._serve.tenants.items():
            self.zmq[tenant] = await AsyncClient.connect(self._serve.address, api_key=key, timeout=20.0)
            self.native[tenant] = await AsyncClient.connect(self._serve.url, api_key=key)
            headers = {"authorization": f"Bearer {key}"} if key else {}
            self.web[tenant] = httpx.AsyncClient(base_url=self._serve.url, headers=headers, timeout=ATTEMPT_SECONDS)
        return self

    async def __aexit__(self, *_exc: object) -> None:
        for client in (*self.zmq.values(), *self.native.values()):
            await client.close()
        for web in self.web.values():
            await web.aclose()

    async def post(self, tenant: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST a request. Raises ServerError for any status but 200."""
        answer = await self.web[tenant].post(path, json=body)
        if answer.status_code != 200:
            raise ServerError(answer.status_code, answer.text)
        return answer.json()

    async def events(self, tenant: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """POST a request for a stream of OpenAI's kind, and read it to its end. Raises ServerError for an error, or if
        the stream breaks."""
        found = []
        async with self.web[tenant].stream("POST", path, json=body | {"stream": True}) as answer:
            if answer.status_code != 200:
                raise ServerError(answer.status_code, (await answer.aread()).decode())
            async for line in answer.aiter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    return found
                if line.startswith("data: "):
                    found.append(json.loads(data))
                    if error := found[-1].get("error"):
                        raise ServerError(RETRIED_ERRORS.get(error.get("type"), 500), error.get("message", ""))
        raise ServerError(503, "the stream ended early")


RETRIED_ERRORS = {"server_error": 503, "rate_limit_error": 429}
"""Statuses of errors within a stream, by their type."""


@dataclass(frozen=True, slots=True)
class Job:
    """`run` gives an answer that is the same each time."""

    kind: str
    name: str
    run: Callable[[Site], Awaitable[Any]]
    truth: Any = None
    """The right answer of workers without a model, if a formula gives it."""


async def answered(job: Job, site: Site) -> Any:
    """Do a job until it is answered. Raises AssertionError if it hangs or is never answered, and whatever the server
    says that does not ask to try again."""
    for _ in range(MAX_ATTEMPTS):
        try:
            async with asyncio.timeout(ATTEMPT_SECONDS):
                answer = await job.run(site)
            site.tally.done[job.kind] += 1
            return answer
        except TimeoutError:
            raise AssertionError(f"{job.name}: no answer within {ATTEMPT_SECONDS:.0f} s") from None
        except httpx.TransportError as problem:
            why = type(problem).__name__
        except (ServerError, ProgramError) as problem:
            refused = problem.problem if isinstance(problem, ProgramError) else problem
            if not isinstance(refused, ServerError) or not (refused.code in RETRIED or LOST in refused.message):
                raise
            why = f"{refused.code} {refused.message}"[:70]
        site.tally.retries[why] += 1
        await asyncio.sleep(RETRY_SECONDS)
    raise AssertionError(f"{job.name}: not answered in {MAX_ATTEMPTS} attempts, the last one: {why}")


def size(answer: Any) -> int:
    """Tokens or characters in an answer."""
    if isinstance(answer, list | tuple):
        return sum(map(size, answer))
    return len(answer) if isinstance(answer, str) else 1


def check_hits(usage: Usage, most: int | None = None) -> None:
    """Assert that what was reused is part of the prompt, and no more than `most` tokens."""
    most = usage.prompt_tokens - 1 if most is None else most
    assert 0 <= usage.cached_tokens <= most, f"{usage}: at most {most} tokens can be cached"


def foretold(prompt: list[int], count: int) -> list[int]:
    """The tokens that a worker without a model adds to a prompt."""
    found, last = [], prompt[-1]
    for position in range(len(prompt) - 1, len(prompt) - 1 + count):
        last = fake_token(last, position, VOCAB)
        found.append(last)
    return found


# ---------------------------------------------------------------- jobs


@program
async def branches(s: Branch, topic: str) -> tuple[list[str], str]:
    s += system(f"You write about the {topic}.")
    s += user("Write three notes.")
    notes = s.fork(3)
    for number, note in enumerate(notes):
        note += assistant(f"Note {number}: ", gen("note", max_tokens=16, temperature=0))
    texts = [await note["note"] for note in notes]
    s += assistant("The best is ", select("best", ["first", "second", "third"]))
    s += user("Go on.")
    s += assistant(gen("end", max_tokens=12, temperature=0))
    return [*texts, await s["best"]], await s["end"]


def make_jobs(rng: random.Random, tenants: list[str], count: int, *, turns_compare: bool) -> list[Job]:
    """`count` jobs of each kind. `turns_compare`: later turns of a chat can be compared, as text that the model says is
    encoded to the tokens that it said."""
    jobs = []
    trunks = [[rng.randrange(3, VOCAB) for _ in range(rng.choice((60, 200)))] for _ in range(3)]
    for number in range(count):
        for make in (_whole, _salted, _streamed, _drawn, _scored, _cancelled, _session, _constrained):
            prompt = [*rng.choice(trunks), *(rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 30)))]
            jobs.append(make(number, rng.choice(tenants), prompt, rng))
        for make in (_chat, _chat_stream, _message):
            jobs.append(make(number, rng.choice(tenants), _history(rng)))
        jobs.append(_turns(number, rng.choice(tenants), rng, turns_compare))
        jobs.append(_program(number, rng.choice(tenants), rng))
    return jobs


def _history(rng: random.Random) -> list[dict[str, str]]:
    said = [f"Tell me about the {rng.choice(WORDS)} and the {rng.choice(WORDS)}." for _ in range(3)]
    return [
        {"role": "system", "content": "You answer briefly. " * 4},
        {"role": "user", "content": said[0]},
        {"role": "assistant", "content": f"It is a {rng.choice(WORDS)}."},
        {"role": "user", "content": said[1] + " " + said[2]},
    ]


def _whole(number: int, tenant: str, prompt: list[int], rng: random.Random) -> Job:
    async def run(site: Site) -> list[int]:
        found = await site.zmq[tenant].generate(prompt, GREEDY, origin=Origin("whole"))
        check_hits(found.usage)
        return found.token_ids

    return Job("generate", f"generate {number}", run, foretold(prompt, GREEDY.max_tokens))


def _salted(number: int, tenant: str, prompt: list[int], rng: random.Random) -> Job:
    long = Sampling(max_tokens=150, temperature=0.0, ignore_eos=True)

    async def run(site: Site) -> list[int]:
        found = await site.zmq[tenant].generate(prompt, long, cache_salt=f"{number} {next(site.numbers)} {id(site)}")
        check_hits(found.usage, most=0)
        return found.token_ids

    return Job("private prefix", f"private prefix {number}", run, foretold(prompt, long.max_tokens))


def _streamed(number: int, tenant: str, prompt: list[int], rng: random.Random) -> Job:
    native, long = rng.random() < 0.5, Sampling(max_tokens=120, temperature=0.0, ignore_eos=True)

    async def run(site: Site) -> list[int]:
        client, found = (site.native if native else site.zmq)[tenant], []
        async for delta in client.stream(prompt, long):
            found += token_list(delta.ids)
            if delta.usage:
                check_hits(delta.usage)
        return found

    return Job("stream", f"stream {number}", run, foretold(prompt, long.max_tokens))


def _drawn(number: int, tenant: str, prompt: list[int], rng: random.Random) -> Job:
    sampling = Sampling(max_tokens=30, temperature=1.0, top_p=0.9, seed=rng.randrange(1000), ignore_eos=True)

    async def run(site: Site) -> list[list[int]]:
        return [token_list(one.ids) for one in await site.zmq[tenant].generate_n(prompt, 3, sampling)]

    return Job("drawn, n=3", f"drawn {number}", run)


def _scored(number: int, tenant: str, prompt: list[int], rng: random.Random) -> Job:
    choices = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 6))] for _ in range(4)]

    async def run(site: Site) -> list[list[float]]:
        found = await site.zmq[tenant].score(prompt, choices)
        return [[round(x, 3) for x in one] for one in found.logprobs]

    return Job("score", f"score {number}", run)


def _cancelled(number: int, tenant: str, prompt: list[int], rng: random.Random) -> Job:
    native, most = rng.random() < 0.5, rng.randrange(1, 40)
    long = Sampling(max_tokens=1000, temperature=0.0, ignore_eos=True)

    async def run(site: Site) -> list[int]:
        client, found = (site.native if native else site.zmq)[tenant], []
        stream = client.stream(prompt, long)
        async for delta in stream:
            found += token_list(delta.ids)
            if len(found) >= most:
                break
        await stream.aclose()
        return found[:most]

    return Job("cancelled stream", f"cancelled stream {number}", run, foretold(prompt, most))


def _session(number: int, tenant: str, prompt: list[int], rng: random.Random) -> Job:
    """Turns by token ids."""
    news = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 20))] for _ in range(4)]

    async def run(site: Site) -> list[list[int]]:
        ids, answers = list(prompt), []
        for new in news:
            ids += new
            body = {"prompt": ids, "max_tokens": 20, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            found = await site.post(tenant, "/v1/completions", body)
            usage = found["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            check_hits(Usage(usage["prompt_tokens"], cached_tokens=cached))
            answers.append(found["choices"][0]["token_ids"])
            ids = ids + answers[-1]
        return answers

    truth, ids = [], list(prompt)
    for new in news:
        ids = [*ids, *new]
        truth.append(foretold(ids, 20))
        ids += truth[-1]
    return Job("session of 4 turns", f"session {number}", run, truth)


def _constrained(number: int, tenant: str, prompt: list[int], rng: random.Random) -> Job:
    sampling = Sampling(max_tokens=40, temperature=0.0, grammar=Grammar("regex", "[a-z]{3,8} (yes|no), [0-9]{4}"))

    async def run(site: Site) -> list[int]:
        return (await site.zmq[tenant].generate(prompt, sampling)).token_ids

    return Job("grammar", f"grammar {number}", run)


def _chat(number: int, tenant: str, history: list[dict[str, str]]) -> Job:
    body = {"messages": history, "max_tokens": 20, "temperature": 0, "return_token_ids": True}

    async def run(site: Site) -> list[int]:
        return (await site.post(tenant, "/v1/chat/completions", body))["choices"][0]["token_ids"]

    return Job("chat", f"chat {number}", run)


def _chat_stream(number: int, tenant: str, history: list[dict[str, str]]) -> Job:
    body = {"messages": history, "max_tokens": 40, "temperature": 0}

    async def run(site: Site) -> str:
        events = await site.events(tenant, "/v1/chat/completions", body)
        return "".join(c["delta"].get("content") or "" for event in events for c in event["choices"])

    return Job("chat stream", f"chat stream {number}", run)


def _message(number: int, tenant: str, history: list[dict[str, str]]) -> Job:
    body = {"model": "nano", "system": history[0]["content"], "messages": history[1:], "max_tokens": 20}

    async def run(site: Site) -> str:
        found = await site.post(tenant, "/v1/messages", body | {"temperature": 0})
        return "".join(block.get("text", "") for block in found["content"])

    return Job("Anthropic message", f"message {number}", run)


def _turns(number: int, tenant: str, rng: random.Random, compare: bool) -> Job:
    """Turns by text."""
    questions = [f"What is the {rng.choice(WORDS)} number {rng.randrange(100)}?" for _ in range(4)]

    async def run(site: Site) -> list[str]:
        chat: list[dict[str, str]] = [{"role": "system", "content": f"These are notes {number}. " * 8}]
        for question in questions:
            chat.append({"role": "user", "content": question})
            body = {"messages": chat, "max_tokens": 20, "temperature": 0}
            message = (await site.post(tenant, "/v1/chat/completions", body))["choices"][0]["message"]
            chat.append({"role": "assistant", "content": message.get("content") or "-"})
        answers = [message["content"] for message in chat if message["role"] == "assistant"]
        return answers if compare else answers[:1]

    return Job("chat of 4 turns", f"chat of 4 turns {number}", run)


def _program(number: int, tenant: str, rng: random.Random) -> Job:
    native, topic = rng.random() < 0.4, f"{rng.choice(WORDS)} {number}"

    async def run(site: Site) -> tuple[list[str], str]:
        return await branches((site.native if native else site.zmq)[tenant], topic)

    return Job("program", f"program {number}", run)
