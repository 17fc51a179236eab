"""Mutated messages on each socket: nobody ends, nothing fails within, and a client that behaves is served."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from radixrt import wire
from radixrt.client.local import LocalStack
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.messages import Ask, Generate, Register, Run, Sampling, TokenPrompt, ToWorker
from tests.chaos.conftest import MEBIBYTE, Notes, messages
from tests.chaos.corpus import PATHS, Kinds, bodies, client_messages, ids, worker_messages
from tests.chaos.mutations import Mutator, as_json
from tests.chaos.normal import Normal
from tests.chaos.peers import (
    QUESTION_ID,
    HttpFuzzer,
    count_answer,
    http_requests,
    send_foreign,
    send_frames,
    send_mutated,
)
from tests.chaos.processes import Recorder
from tests.chaos.stack import Serve

FAST = ("--fake", "0,0", "--max-total-tokens", "20000", "--max-model-len", "400")
LONGEST_SECONDS = 15.0
"""Of a request of the client that behaves."""
MAX_GROWTH = 400 * MEBIBYTE
"""By which a process may be larger at its peak than at the start."""
PEERS = 50
"""Of so many messages, one is of a foreign protocol, and one of a wrong number of frames."""


def parts(count: int, size: int, seconds: float) -> Iterator[int]:
    """Parts of `count`, of up to `size` each, until so many seconds have passed: on a slow machine a run ends early,
    and says how far it came."""
    began = time.monotonic()
    while count > 0 and time.monotonic() - began < seconds:
        yield (part := min(size, count))
        count -= part


@contextmanager
def unimpressed(serve: Serve, notes: Notes, seed: int, *, pins: bool = False) -> Iterator[None]:
    """What is sent in this context ends no process, leaves no traceback in a log, and delays nobody for long."""
    key = next(iter(serve.tenants.values()))
    with serve:
        pids, recorder = serve.pids(), Recorder(lambda: serve.pid)
        normal = Normal(serve.address, key, serve.url, model="nano", seed=seed)
        try:
            with normal:
                yield
                normal.wait_for_more()
        finally:
            recorder.look()
            series = recorder.stop()
            notes.add("client that behaves", normal.summary)
            notes.add_processes(series)
        assert serve.alive and serve.pids() == pids, f"a process has ended: {serve.log.read_text()[-3000:]}"
        assert not (bad := serve.bad_lines()), f"{len(bad)} in the log: {bad[0]}"
        assert max(normal.seconds) < LONGEST_SECONDS, normal.summary
        grown = [f"{s.name}: {s.samples[0].rss} -> {s.peak}" for s in series.values()]
        assert all(s.peak - s.samples[0].rss < MAX_GROWTH for s in series.values()), grown
        serve.check_idle(pinned_share=0.25 if pins else 0.0)


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_the_client_socket_survives_mutated_messages(tmp_path, seed, notes):
    count, serve = messages(100_000), Serve(tmp_path, *FAST, workers=2, frontends=1)
    rng, key = random.Random(seed), serve.tenants["red"]
    with unimpressed(serve, notes, seed, pins=True):
        fuzz_clients(serve.address, key, rng, count * 9 // 10, notes, Kinds())
        serve.check_idle()
        fuzz_clients(serve.address, key, rng, count // 10, notes, Kinds(pins=True))


def fuzz_clients(address: str, key: str, rng: random.Random, count: int, notes: Notes, kinds: Kinds) -> None:
    mutator = Mutator(rng, client_messages(key, rng, kinds))
    question = wire.encode(Ask(id=QUESTION_ID, what="models", api_key=key))
    answers: Counter[int | str] = Counter()
    others = count // PEERS if address.startswith("tcp:") else 0
    sent = 2 * others
    for part in parts(count - sent, 5000, 60.0):
        with wire.Link(address) as link:
            send_mutated(link, mutator.mutated, part, question, answers)
        sent += part
    if others:
        send_foreign(address, mutator, mutator, rng, others)
        send_frames(address, mutator, rng, others)
    notes.add("messages", sent)
    notes.add("replies; errors by code", dict(answers))
    assert not answers[500], "an error within"


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_a_model_survives_mutated_requests(tmp_path, seed, notes):
    """Sampling parameters, grammars and prompts that pass for valid ones come to a real sampler."""
    flags = ("--device", "cpu", "--check", "--max-total-tokens", "6000", "--max-model-len", "160")
    count, serve, answers = messages(100_000) // 100, Serve(tmp_path, *flags, workers=1, frontends=1), Counter()
    rng, key = random.Random(seed), serve.tenants["red"]
    mutator = Mutator(rng, generations(client_messages(key, rng, Kinds())), gentle=True)
    question = wire.encode(Ask(id=QUESTION_ID, what="models", api_key=key))
    with serve:
        pids = serve.pids()
        with wire.Link(serve.address) as link:
            sent = 0
            for part in parts(count, 200, 30.0):
                send_mutated(link, mutator.mutated, part, question, answers)
                sent += part
            serve.check_idle(120)
            for payload in link.drain():
                count_answer(payload, answers)
        notes.add("messages", sent)
        notes.add("replies; errors by code", dict(answers))
        assert serve.pids() == pids and not answers[500]
        assert not (bad := serve.bad_lines()), f"{len(bad)} in the log: {bad[0]}"


def generations(valid: list[bytes]) -> list[bytes]:
    """Those messages that a worker computes."""
    return [one for one in valid if msgspec.msgpack.decode(one)["type"] in ("generate", "score")]


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_the_worker_socket_survives_strangers(tmp_path, seed, notes):
    """Processes of the same machine that find the socket of the stack's own workers, and know the workers' names."""
    serve = Serve(tmp_path, *FAST, workers=2, frontends=1)
    rng = random.Random(seed)
    valid = [one for name in ("worker-0", "worker-1", "x") for one in worker_messages(name, "nano", rng)]
    with unimpressed(serve, notes, seed):
        intrude(serve.near_address(), Mutator(rng, valid), Mutator(rng, valid), rng, messages(100_000) // 2, notes)


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_a_worker_port_survives_strangers(tmp_path, seed, notes):
    """A port that was opened for workers of other names and models takes their malformed messages, and no other
    protocol."""
    serve = Serve(tmp_path, *FAST, workers=2, frontends=1, worker_port=True)
    rng = random.Random(seed)
    known = [one for name in ("worker-0", "worker-1") for one in worker_messages(name, "nano", rng)]
    other = [one for name in ("x", "y") for one in worker_messages(name, "other", rng)]
    other = [one.replace(b"nano", b"none") for one in other]
    with unimpressed(serve, notes, seed):
        intrude(serve.worker_address, Mutator(rng, other), Mutator(rng, known), rng, messages(100_000) // 2, notes)


def intrude(address: str, mutator: Mutator, older: Mutator, rng: random.Random, count: int, notes: Notes) -> None:
    """Send `count` messages to a worker socket, those of `older` in older versions of ZMTP."""
    sent = 2 * (count // PEERS)
    for part in parts(count - sent, 2000, 30.0):
        with wire.Link(address, rng.randbytes(8).replace(b"\0", b"x"), send_timeout=0.2) as link:
            with contextlib.suppress(TimeoutError):  # a stranger is not let in
                send_mutated(link, mutator.mutated, part, None, Counter())
            link.close(linger=0.5)
        sent += part
    send_foreign(address, mutator, older, rng, count // PEERS)
    send_frames(address, mutator, rng, count // PEERS)
    notes.add("messages", sent)


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_http_survives_mutated_requests(tmp_path, seed, notes):
    serve, rng, count = Serve(tmp_path, *FAST, workers=2, frontends=2), random.Random(seed), messages(100_000)
    with unimpressed(serve, notes, seed, pins=True):
        fuzz_http(serve.port, serve.tenants["red"], rng, count * 9 // 10, notes, Kinds())
        serve.check_idle()
        fuzz_http(serve.port, serve.tenants["red"], rng, count // 10, notes, Kinds(pins=True))


def fuzz_http(port: int, key: str, rng: random.Random, count: int, notes: Notes, kinds: Kinds) -> None:
    posts = bodies(rng, kinds)
    mutator = Mutator(rng, [body for _, body in posts], json.loads, as_json)
    fuzzer = HttpFuzzer(port, http_requests(mutator, posts, PATHS, key, rng))
    sent = 0
    for part in parts(count, 5000, 100.0):
        fuzzer.run(part)
        sent += part
    notes.add("requests", sent)
    notes.add("answers by status", dict(fuzzer.statuses.most_common()))
    assert not fuzzer.failed, f"{len(fuzzer.failed)} failed within, such as {fuzzer.failed[0]}"


# ---------------------------------------------------------------- in this process


def local_stack() -> LocalStack:
    router = resolve(RouterConfig(model="nano"))
    worker = WorkerConfig(model="nano", fake="0,0", max_total_tokens=20_000, max_model_len=400)
    return LocalStack(StackConfig(router, worker, FrontendConfig(), 2))


def test_a_router_survives_mutated_messages_of_clients(fixed_seed, notes, caplog):
    with local_stack() as local, Normal(local.address, "", model="nano", seed=fixed_seed):
        fuzz_clients(local.address, "", random.Random(fixed_seed), 500, notes, Kinds(grammars=False))
    assert not failures(caplog)


def test_a_router_survives_mutated_messages_of_a_worker(fixed_seed, notes, caplog):
    mutate_a_worker(fixed_seed, 500, notes)
    assert not failures(caplog)


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_a_router_survives_many_mutated_messages_of_a_worker(seed, notes, caplog):
    mutate_a_worker(seed, messages(100_000), notes)
    assert not failures(caplog)


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Exceptions in the log."""
    found = [record for record in caplog.records if record.exc_info or record.name == "asyncio"]
    return [logging.Formatter().format(record)[-3000:] for record in found[:3]]


def mutate_a_worker(seed: int, count: int, notes: Notes) -> None:
    """A worker that was let in, and serves a model of its own, sends mutated messages; it is asked for that model.
    Others' workers, and their clients, do not notice."""
    rng, name, model = random.Random(seed), "mutant", "mutant-model"
    decoder, runs, sent = wire.Decoder(ToWorker), [1], 0
    shape = {"max_model_len": 4096, "page_size": 1, "total_pages": 1000, "max_running": 8, "vocab_size": 2048}
    register = Register(name=name, model=model, pid=77, incarnation=99, num_states=4, **shape)
    with local_stack() as local, Normal(local.address, "", model="nano", seed=seed):
        # The address as a worker gets it, with whatever proves that it is one of the stack.
        address = local._worker_configs[0].router
        with wire.Link(local.address) as client, wire.Link(address, b"mutant/1") as link:
            for number in (first for part in parts(count, 500, 45.0) for first in range(part)):
                sent += 1
                if number % 100 == 0:
                    link.send(wire.encode(register))
                    mutator = Mutator(rng, worker_messages(name, model, rng, runs[-5:]))
                if number % 10 == 0:
                    prompt = TokenPrompt(ids(*(rng.randrange(3, 2000) for _ in range(20))))
                    wanted = Generate(id=sent, prompt=prompt, sampling=Sampling(max_tokens=4), model=model)
                    client.send(wire.encode(wanted))
                    client.drain()
                    runs += [order.id for order in map(decoder.decode, link.drain()) if isinstance(order, Run)]
                link.send(mutator.mutated())
                if number % 200 == 199:
                    ask_through(client)
        notes.add("messages", sent)
        notes.add("runs that it was sent", len(runs))


def ask_through(link: wire.Link) -> None:
    """Wait until the router has read what was sent before."""
    link.send(wire.encode(Ask(id=QUESTION_ID, what="models")))
    while (payload := link.recv(60)) is not None:
        if wire.Decoder(dict).decode(payload).get("id") == QUESTION_ID:
            return
    raise AssertionError("the router does not answer")
