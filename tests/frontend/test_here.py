"""A front end on the router's own event loop."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import uvloop

from radixrt.client import Client, ServerError
from radixrt.client.transports import HereTransport, RouterTransport
from radixrt.config import FrontendConfig, RouterConfig, WorkerConfig, resolve
from radixrt.frontend.app import Frontend
from radixrt.frontend.server import Server, _serve_both, listen
from radixrt.messages import Cancel, ClientRequest, Delta, Deltas, Error, Generate, Sampling, TokenPrompt
from radixrt.router.server.loop import RouterServer
from radixrt.worker.setup import make_worker
from tests.waiting import eventually

NAMES = {"tokenizer": "none", "served_model_name": "m"}
ENDLESS = Sampling(max_tokens=100_000, ignore_eos=True)


@contextmanager
def together(**settings) -> Iterator[tuple[str, RouterServer, Callable[[], None]]]:
    """(URL of the front end, the router, what tells both to stop), with a fake worker."""
    name = uuid.uuid4().hex
    addresses = {"client_address": f"inproc://c-{name}", "worker_address": f"inproc://w-{name}"}
    router = RouterServer(resolve(RouterConfig(**NAMES, **addresses)))
    config = resolve(FrontendConfig(port=0, **NAMES, **settings))
    sock = listen(config)
    server = Server(Frontend(config, router.text, router))
    worker = make_worker(
        resolve(WorkerConfig(name="w", served_model_name="m", fake="0,0.002", router=addresses["worker_address"]))
    )

    def serve() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve_both(router, server, sock))

    def stop() -> None:
        worker.stop()
        if threads[1].ident is not None:  # first: without a router it would wait for one
            threads[1].join(10)
        server.should_exit = True

    threads = [threading.Thread(target=serve), threading.Thread(target=worker.run)]
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        threads[0].start()
        while not server.started:
            time.sleep(0.001)
        threads[1].start()
        with Client(url) as client:
            while not client.health()["serving"]:
                time.sleep(0.01)
        yield url, router, stop
    finally:
        stop()
        threads[0].join(10)
        router.text.close()
        sock.close()
    assert not any(thread.is_alive() for thread in threads)


def test_it_serves_and_counts():
    with together() as (url, router, _), Client(url) as client:
        done = client.generate([1, 2, 3], Sampling(max_tokens=5))
        again = client.generate([1, 2, 3], Sampling(max_tokens=5))
        assert len(done.token_ids) == 5 and again.token_ids == done.token_ids
        assert (done.usage.cached_tokens, again.usage.cached_tokens) == (0, 2)
        assert sum(len(delta.ids) // 4 for delta in client.stream([4, 5], Sampling(max_tokens=9))) == 9
        assert client.report()["total"]["requests"] == 3
        with pytest.raises(ServerError, match="stop strings need a tokenizer"):
            client.generate([1], Sampling(stop=("x",)))
        assert router.core.runs_in_flight == 0


@pytest.mark.parametrize("field", ["top_k", "min_tokens"])
def test_a_number_that_no_worker_takes_is_refused(field):
    """It would be placed, and could not be sent: nobody would ever end it."""
    with together() as (url, router, _), Client(url) as client:
        for number in (1 << 31, 1 << 70):
            with pytest.raises(ServerError, match=f"{field} must be in"):
                client.generate([1, 2, 3], Sampling(**{"max_tokens": 3 if field == "top_k" else None, field: number}))
        assert router.core.runs_in_flight == 0


def test_a_client_that_leaves_is_cancelled():
    with together() as (url, router, _), Client(url) as client:
        stream = client.stream([1, 2, 3], ENDLESS)
        next(stream)
        stream.close()
        eventually(lambda: not router.core.runs_in_flight)
        assert router.core.counters.cancelled == 1


def test_what_is_in_flight_ends_with_an_error_when_it_stops():
    with together() as (url, _, stop), Client(url) as client:
        stream = client.stream([1, 2, 3], ENDLESS)
        next(stream)
        stop()
        with pytest.raises(ServerError, match="shutting down|ended before"):
            for _ in stream:
                pass


def test_replies_never_come_within_a_request():
    """Whoever asks has noted the id of its request before an answer to it can come."""

    async def run() -> list[str]:
        name = uuid.uuid4().hex
        addresses = {"client_address": f"inproc://c-{name}", "worker_address": f"inproc://w-{name}"}
        router = RouterServer(resolve(RouterConfig(**NAMES, **addresses)))
        stop, ready = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(router.run(stop, ready.set))
        await ready.wait()
        seen: list[str] = []
        transport = HereTransport(router)
        transport.submit(
            Generate(id=0, prompt=TokenPrompt(b"\1\0\0\0")), lambda answer: seen.append(type(answer).__name__)
        )
        seen.append("asked")
        await asyncio.sleep(0.05)
        await transport.close()
        stop.set()
        await task
        router.text.close()
        return seen

    assert asyncio.run(run()) == ["asked", Error.__name__]


def test_each_front_end_hears_of_its_own():
    async def run() -> None:
        name = uuid.uuid4().hex
        addresses = {"client_address": f"inproc://c-{name}", "worker_address": f"inproc://w-{name}"}
        router = RouterServer(resolve(RouterConfig(**NAMES, **addresses)))
        heard: list[list[object]] = [[], []]
        first, second = router.attach(heard[0].append), router.attach(heard[1].append)
        assert first != second
        router._answer(first, Deltas([]))
        await asyncio.sleep(0)
        assert [len(found) for found in heard] == [1, 0]
        router.text.close()

    asyncio.run(run())


def test_an_answer_that_cannot_be_taken_in_harms_no_other():
    sent: list[object] = []

    class Sent(RouterTransport):
        def _post(self, message: ClientRequest) -> bool:
            sent.append(message)
            return True

    heard: dict[str, list[object]] = {"broken": [], "whole": []}

    def broken(answer: object) -> None:
        heard["broken"].append(answer)
        raise RecursionError

    transport = Sent()
    prompt = TokenPrompt(b"\1\0\0\0")
    first = transport.submit(Generate(id=0, prompt=prompt), broken)
    second = transport.submit(Generate(id=0, prompt=prompt), heard["whole"].append)
    transport._take(Deltas([Delta(first, 0, b"\1\0\0\0"), Delta(second, 0, b"\1\0\0\0", finish="stop")]))
    transport._take(Deltas([Delta(first, 0, b"\2\0\0\0")]))
    assert [answer.finish for answer in heard["whole"]] == ["stop"]
    assert [type(answer) for answer in heard["broken"]] == [Delta, Error] and heard["broken"][1].code == 500
    assert sent[2:] == [Cancel(first)] and not transport._pending
