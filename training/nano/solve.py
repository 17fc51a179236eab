"""A model's answers to tasks, over OpenAI's API; its calls are carried out by the task's own tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from radixrt.client.local import LocalStack
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.frontend.server import FrontendThread
from radixrt.process.ports import free_tcp_address
from training.nano.tasks import Call, Example

MAX_TURNS = 8
"""Of the assistant."""
MAX_TOKENS = 256
"""Of a turn."""
REQUEST_SECONDS = 300.0


class Refused(RuntimeError):
    """The endpoint did not answer a request as OpenAI's API does."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one example: the last turn's text, all calls in order, whether `check` takes them; the tokens of all
    its prompts, and how many of them the endpoint says were cached; and, where log-probabilities were asked for, how
    many tokens it said, and their surprise: the sum of -log p, in nats."""

    text: str
    calls: list[Call]
    right: bool
    prompt_tokens: int = 0
    cached_tokens: int = 0
    said_tokens: int = 0
    surprise: float = 0.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI endpoint. `url` ends with /v1. constrained: JSON tasks come with their schema as `response_format`.
    logprobs: ask for the log-probability of what is said."""

    url: str
    model: str
    api_key: str = "-"
    constrained: bool = False
    logprobs: bool = False

    async def solve(self, http: httpx.AsyncClient, example: Example) -> Outcome:
        """Greedy. Refused if the endpoint does not answer."""
        messages, calls, text = list(example.messages), [], ""
        prompt_tokens = cached_tokens = said_tokens = 0
        surprise = 0.0
        for _ in range(MAX_TURNS):
            reply = await self._ask(http, self._body(messages, example))
            choice = reply["choices"][0]
            usage, message = reply.get("usage") or {}, choice["message"]
            said = (choice.get("logprobs") or {}).get("content") or ()
            said_tokens += len(said)
            surprise -= sum(token["logprob"] for token in said)
            prompt_tokens += usage.get("prompt_tokens") or 0
            cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            text, made = message.get("content") or "", message.get("tool_calls") or []
            if not made:
                break
            messages.append({"role": "assistant", "content": message.get("content"), "tool_calls": made})
            for call in made:
                name, arguments = _read(call["function"])
                calls.append((name, arguments))
                result = example.run_tool(name, arguments)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        right = bool(example.check(text, calls))
        return Outcome(text, calls, right, prompt_tokens, cached_tokens, said_tokens, surprise)

    def _body(self, messages: list[dict[str, Any]], example: Example) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}
        if self.logprobs:
            body["logprobs"] = True
        if example.tools:
            body["tools"] = example.tools
        if example.schema and self.constrained:
            form = {"name": "reply", "schema": example.schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        return body

    async def _ask(self, http: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {self.api_key}"}
        try:
            reply = await http.post(f"{self.url.rstrip('/')}/chat/completions", json=body, headers=headers)
        except httpx.HTTPError as error:
            raise Refused(f"{self.url}: {type(error).__name__} {error}") from error
        if reply.status_code != 200:
            raise Refused(f"{self.url}: {reply.status_code} {reply.text[:500]}")
        return reply.json()

    async def solve_all(
        self, examples: Sequence[Example], concurrency: int, done: Callable[[], None] = lambda: None
    ) -> list[Outcome]:
        """So many at a time, begun in order; `done` is called after each. Refused at the first that fails."""
        gate = asyncio.Semaphore(concurrency)
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        async with httpx.AsyncClient(timeout=REQUEST_SECONDS, limits=limits) as http:

            async def one(example: Example) -> Outcome:
                async with gate:
                    outcome = await self.solve(http, example)
                done()
                return outcome

            tasks = [asyncio.create_task(one(example)) for example in examples]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()


def _read(function: dict[str, Any]) -> Call:
    """A call; arguments that are no JSON object fit no tool."""
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        arguments = None
    return function["name"], arguments if isinstance(arguments, dict) else {"": function["arguments"]}


@contextmanager
def serve(model: str, **worker: Any) -> Iterator[Endpoint]:
    """A router, a worker and a front end in threads of this process; `worker` are fields of WorkerConfig."""
    config = WorkerConfig(model=model, **worker)
    stack = StackConfig(resolve(RouterConfig(model=model)), config, FrontendConfig())
    with LocalStack(stack, client_address=free_tcp_address()) as running:
        frontend = FrontendThread(resolve(FrontendConfig(model=model, router=running.address, port=0)))
        try:
            yield Endpoint(f"{frontend.url}/v1", resolve(config).served_model_name)
        finally:
            frontend.stop()
