"""`cache_control` through the whole stack: what is pinned stays, where all else is evicted."""

from __future__ import annotations

import anthropic
import pytest

from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.frontend.server import FrontendThread
from radixrt.launch import LocalStack


@pytest.fixture(scope="module")
def client(folder):
    """Of a stack with 4,000 tokens of pages."""
    names = {"model": str(folder), "served_model_name": "m"}
    worker = WorkerConfig(**names, fake="0,0", max_total_tokens=4000, max_pinned_share=0.3, check=True)
    with LocalStack(StackConfig(resolve(RouterConfig(**names)), worker, FrontendConfig(), 1)) as stack:
        frontend = FrontendThread(resolve(FrontendConfig(**names, router=stack.address, port=0)))
        try:
            with anthropic.Anthropic(base_url=frontend.url, api_key="any", max_retries=0) as client:
                yield client
        finally:
            frontend.stop()


def words(what: str, count: int = 120) -> str:
    return " ".join(f"{what}{i}" for i in range(count))


def ask(client, system, user="hello", stream=False):
    """The usage of an answer."""
    turns = [{"role": "user", "content": user}]
    fields = {"model": "m", "max_tokens": 4, "messages": turns, "system": system}
    if not stream:
        return client.messages.create(**fields).usage
    return [event for event in client.messages.create(**fields, stream=True) if event.type == "message_delta"][0].usage


@pytest.mark.parametrize("stream", [False, True])
def test_a_breakpoint_keeps_its_prefix(client, stream):
    pinned = [{"type": "text", "text": words(f"p{stream}"), "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    plain = [{"type": "text", "text": words(f"q{stream}")}]
    created = ask(client, pinned, stream=stream).cache_creation_input_tokens
    ask(client, plain)
    assert 200 < created < 1200
    for n in range(12):
        ask(client, words(f"flood{n}"))
    assert ask(client, plain).cache_read_input_tokens < 20
    again = ask(client, pinned, "another question", stream=stream)
    assert again.cache_read_input_tokens >= created and again.cache_creation_input_tokens == 0


def test_a_request_that_needs_every_page(client):
    pinned = [{"type": "text", "text": words("z"), "cache_control": {"type": "ephemeral"}}]
    ask(client, pinned)
    size = client.messages.count_tokens(model="m", messages=[{"role": "user", "content": words("y", 740)}]).input_tokens
    assert 3000 < size < 3990, "more than the pins leave"
    assert ask(client, [], words("y", 740)).output_tokens == 4
