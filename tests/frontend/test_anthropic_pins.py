"""`cache_control` through the whole stack: what is pinned stays, where all else is evicted."""

from __future__ import annotations

import anthropic
import numpy as np
import pytest

from radixrt.client.local import LocalStack
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.frontend.anthropic.caching import common_length, prefix_tokens
from radixrt.frontend.server import FrontendThread
from radixrt.tokens import load_tokenizer


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


def test_tokens_of_a_prefix(folder):
    """However its text is spelled: answers have the ids that were generated, which an encoding would not give."""
    tokenizer = load_tokenizer(folder)
    head, answer, tail = "<|im_start|>user\nthe question<|im_end|>\n", "the answer 東京", "<|im_end|>\nand then the dog"
    spelled = [tokenizer.encode(c, False) for c in answer]
    before, within = tokenizer.encode(head, False), [i for ids in spelled for i in ids]
    whole = np.array(before + within + tokenizer.encode(tail, False), dtype="<i4").tobytes()
    assert within != tokenizer.encode(answer, False)
    assert prefix_tokens(tokenizer, head, whole) == len(before)
    assert prefix_tokens(tokenizer, head + answer, whole) == len(before) + len(within)
    assert prefix_tokens(tokenizer, head + answer + tail, whole) == len(whole) // 4
    assert prefix_tokens(tokenizer, "", whole) == 0


@pytest.mark.parametrize(
    ("one", "other", "length"),
    [("", "", 0), ("", "a", 0), ("abc", "abc", 3), ("abc", "abd", 2), ("abc", "ab", 2), ("xab", "yab", 0)],
)
def test_common_length(one, other, length):
    assert common_length(one, other) == common_length(other, one) == length
