"""The client where the server is not as it should be. What it does otherwise is tested with each transport."""

from __future__ import annotations

import asyncio
import concurrent.futures
import http.server
import os
import signal
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from radixrt import Branch, gen, program
from radixrt.client import AsyncClient, Client, ServerError, as_prompt, token_bytes, token_list
from radixrt.client.local import LocalStack, local_stack
from radixrt.client.transports import HttpTransport, ZmqTransport
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.frontend.server import FrontendThread
from radixrt.messages import ChatPrompt, Forget, Sampling, TextPrompt, TokenPrompt
from radixrt.process.ports import free_tcp_address
from radixrt.router.server.process import RouterThread
from tests.checkpoints import make_model, make_tokenizer
from tests.waiting import eventually

SHORT = Sampling(max_tokens=8)
ENDLESS = Sampling(max_tokens=100_000, ignore_eos=True)


def fake_stack(fake: str = "0,0.005", **options) -> LocalStack:
    worker = WorkerConfig(served_model_name="m", fake=fake)
    return LocalStack(StackConfig(RouterConfig(tokenizer="none"), worker, FrontendConfig()), **options)


@contextmanager
def serving(scheme: str, fake: str = "0,0.005", **settings) -> Iterator[str]:
    """The address of a stack, at its router's ZMQ socket or at an HTTP front end."""
    with fake_stack(fake) as stack:
        if scheme == "zmq":
            yield stack.address
            return
        names = {"tokenizer": "none", "served_model_name": "m", "port": 0}
        frontend = FrontendThread(resolve(FrontendConfig(router=stack.address, **names, **settings)))
        try:
            yield frontend.url
        finally:
            frontend.stop()


both = pytest.mark.parametrize("scheme", ["zmq", "http"])


def wait_for_cancelled(client: Client, count: int) -> None:
    def cancelled() -> bool:
        health = client.health()
        return health["counters"]["cancelled"] == count and not health["runs_in_flight"]

    eventually(cancelled)


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
    assert time.monotonic() - began < 4.5, "the default timeout is longer"


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


def test_a_front_end_that_goes_away_fails_what_is_in_flight():
    with fake_stack() as stack:
        names = {"tokenizer": "none", "served_model_name": "m", "port": 0}
        frontend = FrontendThread(resolve(FrontendConfig(router=stack.address, **names)))
        with Client(frontend.url) as client:
            stream = client.stream([1, 2, 3], ENDLESS)
            next(stream)
            threading.Thread(target=frontend.stop).start()
            with pytest.raises(ServerError) as caught:
                list(stream)
            assert caught.value.code == 503


@both
def test_a_task_that_is_cancelled_cancels_its_request(scheme):
    with serving(scheme) as address, Client(address) as client:

        async def impatient():
            for work in (client.aio.generate([1, 2], ENDLESS), client.aio.generate_n([1, 2], 3, ENDLESS)):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(work, 0.1)

        client.run(impatient())
        wait_for_cancelled(client, 2)


@both
@pytest.mark.parametrize("n", [0, -1])
def test_less_than_one_choice_is_an_error(scheme, n):
    with serving(scheme) as address, Client(address) as client:
        for ask in (lambda: client.generate_n([1, 2], n), lambda: list(client.stream([1, 2], n=n))):
            with pytest.raises(ServerError) as caught:
                ask()
            assert (caught.value.code, caught.value.field) == (400, "n")


@both
def test_leaving_a_stream_cancels_it(scheme):
    with serving(scheme) as address, Client(address) as client:
        for _ in client.stream([1, 2], ENDLESS):
            break
        wait_for_cancelled(client, 1)

        async def leave():
            stream = client.aio.stream([1, 2], ENDLESS, n=2)
            await anext(stream)
            await stream.aclose()

        client.run(leave())
        wait_for_cancelled(client, 2)


@both
def test_an_interrupt_cancels(scheme):
    """Ctrl-C: the request has been cancelled at the server when KeyboardInterrupt arrives."""
    with serving(scheme) as address, Client(address) as client, Client(address) as other:
        for work in (lambda: client.generate([1, 2], ENDLESS), lambda: list(client.stream([1, 2], ENDLESS))):
            before = other.health()["counters"]["cancelled"]
            timer = threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                work()
            timer.join()
            wait_for_cancelled(other, before + 1)
        assert client.generate([1, 2], SHORT).ids, "the client goes on"


@both
def test_an_interrupt_may_come_at_any_moment(scheme):
    """While nothing is awaited too, between two deltas: nothing is left running, nothing else is raised."""
    with serving(scheme, "0,0.0002") as address, Client(address) as client:
        for number in range(60):
            timer = threading.Timer(0.002 + number % 20 * 0.0007, os.kill, (os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                timer.start()
                for _ in client.stream([1, 2], ENDLESS):
                    continue
        eventually(lambda: not client.health()["runs_in_flight"])


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


@both
def test_closing_fails_what_waits_and_cancels_it(scheme):
    with serving(scheme) as address, Client(address) as other:
        client = Client(address)
        failures = []

        def wait() -> None:
            try:
                client.generate([1, 2], ENDLESS)
            except ServerError as error:
                failures.append(error.message)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.1)
        began = time.monotonic()
        client.close()
        thread.join(5)
        assert failures == ["the connection was closed"]
        wait_for_cancelled(other, 1)
        assert time.monotonic() - began < 4.5, "told, not found out by the router's keepalive"


@both
def test_a_closed_client_says_so(scheme):
    with serving(scheme) as address:
        client = Client(address)
        stream = client.stream([1, 2], ENDLESS)
        next(stream)
        client.close()
        client.close()
        for use in (lambda: client.generate([1], SHORT), stream.__next__, client.health):
            with pytest.raises(RuntimeError, match="client is closed"):
                use()
        del stream, use

        async def closed():
            client = await AsyncClient.connect(address)
            await client.close()
            await client.close()
            with pytest.raises(RuntimeError, match="client is closed"):
                await client.generate([1], SHORT)

        asyncio.run(closed())


def test_closing_ends_what_other_threads_run():
    with fake_stack("0,0") as stack:
        client = Client(stack.address)
        found = []

        def wait() -> None:
            try:
                client.run(asyncio.sleep(60))
            except concurrent.futures.CancelledError as problem:
                found.append(problem)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.05)
        client.close()
        thread.join(5)
        assert len(found) == 1


def test_a_call_that_comes_while_the_loop_ends_is_not_left_waiting(monkeypatch):
    with fake_stack("0,0") as stack:
        client = Client(stack.address)
        loop, found = client._loop_thread._loop, []

        def wait() -> None:
            try:
                client.run(asyncio.sleep(60))
            except concurrent.futures.CancelledError as problem:
                found.append(problem)

        late = threading.Thread(target=wait, daemon=True)

        def stop_late() -> None:
            monkeypatch.undo()
            late.start()
            time.sleep(0.05)
            loop.stop()

        monkeypatch.setattr(loop, "stop", stop_late)
        client.close()
        late.join(5)
        assert len(found) == 1


def test_several_threads_may_close_a_client():
    with fake_stack("0,0") as stack:
        problems = []
        for _ in range(10):
            client = Client(stack.address)

            def close(client: Client = client) -> None:
                try:
                    client.close()
                    client.health()
                except BaseException as problem:
                    problems.append(str(problem))

            threads = [threading.Thread(target=close, daemon=True) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(5)
        assert problems == ["the client is closed"] * 40


def test_the_plain_face_refuses_to_wait_for_itself():
    with fake_stack("0,0") as stack, Client(stack.address) as client:

        async def inside():
            return client.generate([1, 2], SHORT)

        with pytest.raises(RuntimeError, match="await the AsyncClient"):
            client.run(inside())


def test_a_web_server_that_is_not_ours():
    class Page(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>welcome</html>")

        def log_message(self, *_):
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever).start()
        with pytest.raises(ConnectionError, match="no radixrt answers there .HTTP status 200"):
            Client(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()


def test_what_a_front_end_refuses_is_a_server_error():
    with serving("http", max_body_bytes=4000) as address, Client(address) as client:
        with pytest.raises(ServerError, match="larger than 4000 bytes") as caught:
            client.generate(list(range(1, 5000)), SHORT)
        assert caught.value.code == 413
        assert client.generate([1, 2], SHORT).ids
    with serving("http", api_key=("tenant:secret",)) as address:
        with pytest.raises(ServerError) as caught:
            Client(address, api_key="wrong")
        assert caught.value.code == 401


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


def test_in_process_cancelled_while_it_begins(tmp_path, monkeypatch):
    make_model(tmp_path)
    make_tokenizer(tmp_path)
    stack, before = local_stack(str(tmp_path)), threading.active_count()
    monkeypatch.setattr("radixrt.client.local.local_stack", lambda _: stack)

    async def impatient():
        async with asyncio.timeout(0.001):
            await AsyncClient.connect(f"local:{tmp_path}")

    with pytest.raises(TimeoutError):
        asyncio.run(impatient())
    eventually(lambda: threading.active_count() <= before and stack._threads)


def test_the_router_does_not_answer():
    """A router that hangs is an error after `timeout`, not a wait for ever."""
    router = RouterThread(
        RouterConfig(tokenizer="none", client_address="inproc://hang", worker_address="inproc://hang-w")
    )
    try:
        with Client("inproc://hang", timeout=0.2) as client:
            router.server.take = lambda *_: time.sleep(0.6)
            with pytest.raises(ServerError, match="does not answer"):
                client.health()
    finally:
        router.stop()


# ---------------------------------------------------------------- nobody there (any more)


def test_a_request_waits_for_a_router_that_is_not_there_but_not_for_ever():
    address = free_tcp_address()
    stack = fake_stack(client_address=address)
    stack.__enter__()
    with Client(address, timeout=0.4) as client:
        stack.__exit__()
        eventually(lambda: not client.aio._transport.connected)
        for use in (
            lambda: client.generate([1, 2], SHORT),
            lambda: list(client.stream([1, 2], SHORT)),
            lambda: client.score([1], [[2]]),
            lambda: client.tokenize("x"),
        ):
            began = time.monotonic()
            with pytest.raises(ServerError, match="the router cannot be reached") as caught:
                use()
            assert caught.value.code == 503 and time.monotonic() - began < 4.5
        with fake_stack(client_address=address):
            eventually(lambda: client.aio._transport.connected)
            health = client.health()["counters"]
            assert health["requests"] == health.get("cancelled", 0), "nobody waits for what was asked before"
            assert client.generate([1, 2], SHORT).ids, "the client goes on"


def test_a_request_is_answered_by_a_router_that_starts_in_time():
    """One that needs no worker, which may come later than the router."""
    address = free_tcp_address()

    async def early() -> dict:
        client = AsyncClient(ZmqTransport(address, timeout=20), timeout=20)
        try:
            waiting = asyncio.ensure_future(client.health())
            await asyncio.sleep(0.1)
            assert not waiting.done()
            stack = await asyncio.to_thread(fake_stack(client_address=address).__enter__)
            try:
                return await waiting
            finally:
                await asyncio.to_thread(stack.__exit__)
        finally:
            await client.close()

    assert "workers" in asyncio.run(early())


def test_a_request_that_was_delivered_may_take_longer_than_the_timeout():
    address = free_tcp_address()

    async def slow() -> bytes:
        client = AsyncClient(ZmqTransport(address, timeout=0.6))
        try:
            waiting = asyncio.ensure_future(client.generate([1, 2], SHORT))
            assert not client._transport.connected
            return (await waiting).ids
        finally:
            await client.close()

    with fake_stack("0,0.15", client_address=address):
        began = time.monotonic()
        assert len(asyncio.run(slow())) == 4 * 8 and time.monotonic() - began > 0.9


# ---------------------------------------------------------------- where a client may be used

ELSEWHERE = "belongs to the event loop, and the process, that it was first used on.* plain Client"


@both
def test_an_async_client_is_refused_on_another_event_loop(scheme):
    @program
    async def asks(s: Branch) -> str:
        s += "start"
        s += gen("x", SHORT)
        return await s["x"]

    async def elsewhere(client: AsyncClient) -> None:
        for use in (lambda: client.generate([1], SHORT), client.health, client.close, lambda: asks(client)):
            with pytest.raises(RuntimeError, match=ELSEWHERE):
                await asyncio.wait_for(use(), 5)

    with serving(scheme) as address, Client(address) as client:
        assert client.generate([1, 2], SHORT).ids
        asyncio.run(elsewhere(client.aio))
        assert client.generate([1, 2], SHORT).ids, "it goes on where it belongs"


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@both
def test_a_client_is_refused_in_a_process_that_was_forked_off(scheme):
    with serving(scheme) as address, asyncio.Runner() as runner:
        aio = runner.run(AsyncClient.connect(address))
        with Client(address) as client:
            assert in_a_fork(lambda: runner.run(aio.health())).startswith("a client belongs to the event loop, and")
            assert in_a_fork(client.health) == "a Client does not go along into another process: make one there"
            assert in_a_fork(client.close) == "nothing was raised"
            assert client.health()["serving"]
        assert runner.run(aio.health())["serving"]
        runner.run(aio.close())


def in_a_fork(use: Callable[[], object]) -> str:
    """The message of the RuntimeError that `use` raises in a child of this process."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        try:
            use()
            os.write(writing, b"nothing was raised")
        except RuntimeError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as said:
        text = said.read()
    os.waitpid(child, 0)
    return text


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://v1", "http://v1"),
        ("http://h:1/v1/", "http://h:1"),
        ("https://h/a/v1", "https://h/a"),
        ("http://h/v10", "http://h/v10"),
    ],
)
def test_only_a_path_loses_its_version(url, base):
    assert str(HttpTransport(url)._client.base_url).rstrip("/") == base


@pytest.mark.parametrize("late", [False, True])
def test_a_close_that_is_cancelled_stops_what_runs_in_this_process(late, monkeypatch):
    """While a server that reads nothing is given time, or while the connection is closed."""
    stopped = threading.Event()

    async def main() -> None:
        transport = ZmqTransport("ipc:///nowhere/to/be/found")
        client, close = AsyncClient(transport, local=SimpleNamespace(__exit__=stopped.set)), transport.close
        if late:
            monkeypatch.setattr(transport, "close", lambda: asyncio.sleep(60))
        else:
            client.tell(Forget(id=0, scope="x"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.close(), 0.05)
        await close()

    asyncio.run(main())
    assert stopped.is_set()


@pytest.mark.parametrize("end", ["/v1", "/v1/"])
def test_an_address_may_end_as_openais_clients_want_it(end):
    with serving("http") as address, Client(address + end) as client:
        assert client.generate([1, 2], SHORT).ids and client.health()["serving"]
