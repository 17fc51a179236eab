"""The client where the server is not as it should be. What it does otherwise is tested with each transport."""

from __future__ import annotations

import asyncio
import threading
import time
from array import array

import pytest

from radixrt.client import AsyncClient, Client, ServerError, as_prompt, token_bytes, token_list
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig
from radixrt.launch import LocalStack, free_tcp_address
from radixrt.messages import ChatPrompt, Sampling, TextPrompt, TokenPrompt
from radixrt.router.process import RouterThread
from tests.checkpoints import make_model, make_tokenizer

SHORT = Sampling(max_tokens=8)
ENDLESS = Sampling(max_tokens=100_000, ignore_eos=True)


def fake_stack(fake: str = "0,0.005", **options) -> LocalStack:
    worker = WorkerConfig(served_model_name="m", fake=fake)
    return LocalStack(StackConfig(RouterConfig(tokenizer="none"), worker, FrontendConfig()), **options)


def wait_for_cancelled(client: Client, count: int) -> None:
    deadline = time.monotonic() + 5
    while True:
        health = client.health()
        if health["counters"]["cancelled"] == count and not health["runs_in_flight"]:
            return
        assert time.monotonic() < deadline, health
        time.sleep(0.01)


def test_prompts_of_all_kinds():
    assert as_prompt("x") == TextPrompt("x")
    assert as_prompt([1, 2]) == as_prompt((1, 2)) == as_prompt(array("i", [1, 2])) == TokenPrompt(token_bytes([1, 2]))
    assert as_prompt([]) == TokenPrompt(b"")
    assert as_prompt([{"role": "user", "content": "x"}]) == ChatPrompt([{"role": "user", "content": "x"}])
    assert token_list(token_bytes([5, 7])) == [5, 7]
    for wrong in (3, None, ["a"], [1, "a"], {"role": "user"}, b"raw"):
        with pytest.raises(TypeError):
            as_prompt(wrong)


@pytest.mark.parametrize("scheme", ["tcp", "http"])
def test_nobody_there(scheme):
    address = free_tcp_address().replace("tcp", scheme)
    began = time.monotonic()
    with pytest.raises(ConnectionError, match="nobody answers"):
        Client(address, timeout=0.3)
    assert time.monotonic() - began < 3


@pytest.mark.parametrize("address", ["nonsense", "ftp://x", "tcp://nohost", "tcp://127.0.0.1:1#zz", "local:/nowhere"])
def test_addresses_that_are_none(address):
    with pytest.raises(ValueError):
        Client(address, timeout=0.3)


def test_a_router_that_goes_away_fails_what_is_in_flight():
    address = free_tcp_address()
    stack = fake_stack(client_address=address)
    stack.__enter__()
    with Client(address) as client:
        stream = client.stream([1, 2, 3], ENDLESS)
        next(stream)
        stopper = threading.Thread(target=stack.__exit__)
        stopper.start()
        with pytest.raises(ServerError, match="connection to the router was lost") as caught:
            list(stream)
        assert caught.value.code == 503
        stopper.join()


def test_a_task_that_is_cancelled_cancels_its_request():
    with fake_stack() as stack, Client(stack.address) as client:

        async def impatient():
            for work in (client.aio.generate([1, 2], ENDLESS), client.aio.generate_n([1, 2], 3, ENDLESS)):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(work, 0.1)

        client.run(impatient())
        wait_for_cancelled(client, 2)


def test_leaving_a_stream_cancels_it():
    with fake_stack() as stack, Client(stack.address) as client:
        for _ in client.stream([1, 2], ENDLESS):
            break
        wait_for_cancelled(client, 1)

        async def leave():
            stream = client.aio.stream([1, 2], ENDLESS, n=2)
            await anext(stream)
            await stream.aclose()

        client.run(leave())
        wait_for_cancelled(client, 2)


def test_one_client_in_many_threads():
    with fake_stack("0,0") as stack, Client(stack.address) as client:
        expected = {i: client.generate([i, i + 1], SHORT).ids for i in range(1, 9)}
        found: dict[int, bytes] = {}

        def ask(i: int) -> None:
            found[i] = client.generate([i, i + 1], SHORT).ids

        threads = [threading.Thread(target=ask, args=(i,)) for i in expected]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert found == expected


def test_closing_fails_what_waits():
    with fake_stack() as stack:
        client = Client(stack.address)
        failures = []

        def wait() -> None:
            try:
                client.generate([1, 2], ENDLESS)
            except ServerError as error:
                failures.append(error.message)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.1)
        client.run(client.aio.close())
        thread.join(5)
        assert failures == ["the connection was closed"]
        client._portal.close()


def test_in_process(tmp_path):
    """`local:FOLDER`: a router and a CPU worker in threads, gone when the client is closed."""
    make_model(tmp_path)
    make_tokenizer(tmp_path)
    before = threading.active_count()
    with Client(f"local:{tmp_path}") as client:
        text = client.generate("The quick brown fox", Sampling(max_tokens=8, temperature=0.0)).text
        assert isinstance(text, str) and client.health()["workers"][0]["device"] == "cpu"
    assert threading.active_count() <= before

    async def one():
        async with await AsyncClient.connect(f"local:{tmp_path}") as client:
            return (await client.generate("The quick brown fox", Sampling(max_tokens=8, temperature=0.0))).text

    assert asyncio.run(one()) == text


def test_the_router_does_not_answer():
    """A router that hangs is an error after `timeout`, not a wait for ever."""
    router = RouterThread(
        RouterConfig(tokenizer="none", client_address="inproc://hang", worker_address="inproc://hang-w")
    )
    try:
        with Client("inproc://hang", timeout=0.2) as client:
            router.server._ask = lambda message: time.sleep(0.6)
            with pytest.raises(ServerError, match="does not answer"):
                client.health()
    finally:
        router.stop()
