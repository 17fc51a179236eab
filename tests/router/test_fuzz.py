"""Some thousands of messages that are almost right, on both sockets: nothing fails, and others are served."""

from __future__ import annotations

import logging
import random
from array import array

import pytest
from mutated import EVENTS, FROM_CLIENTS, FROM_WORKERS, LOGPROB, PROMPT, mutated
from sim_workers import continuation, register
from stack import Client, stack

from radixrt import wire
from radixrt.messages import (
    Ask,
    ClientReply,
    Generate,
    Load,
    Output,
    Run,
    Sampling,
    StepDone,
    ToRouter,
    ToWorker,
    Unknown,
)
from tests.waiting import eventually

_order, _reply = wire.Decoder(ToWorker), wire.Decoder(ClientReply)


def faults(caplog) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("number", [800, pytest.param(50_000, marks=pytest.mark.slow)])
def test_mutated_messages_disturb_nobody(number, caplog):
    with stack() as (router, _, client):
        bad, answers = Client(router.server.client_address), 0
        with wire.Link(router.server.worker_address) as worker:
            pairs = zip(mutated(FROM_CLIENTS, number, 1), mutated(FROM_WORKERS, number, 2), strict=True)
            for step, (request, report) in enumerate(pairs):
                bad.link.send(request)
                worker.send(report)
                answers += len([_reply.decode(payload) for payload in bad.link.drain()])
                if step % 100 == 0:
                    client.send(Generate(id=step, prompt=PROMPT, model="m", sampling=Sampling(max_tokens=8)))
                    (delta,) = client.gather(1).values()
                    assert list(array("i", delta.ids)) == continuation(PROMPT.ids, 8)
                    worker.drain()
        bad.link.close()
        assert answers > number / 2 and not faults(caplog)


@pytest.mark.parametrize(
    "message",
    [
        *(register("w0", **{field: n}) for field in ("vocab_size", "num_states", "page_size") for n in (-1, 1 << 31)),
        *(StepDone([Output(1, [5, token])], Load()) for token in (-1, 1 << 31)),
        StepDone([Output(1, cached_tokens=1 << 31)], Load()),
    ],
)
def test_numbers_of_workers_have_bounds(message):
    """Those that the router computes with, or makes arrays of."""
    with pytest.raises(wire.Malformed, match="Expected `int`"):
        wire.Decoder(ToRouter).decode(wire.encode(message))


@pytest.mark.parametrize("number", [800, pytest.param(50_000, marks=pytest.mark.slow)])
def test_mutated_results_of_runs_disturb_nobody(number, caplog):
    """A worker says odd things of the runs that it has; requests end in some way."""
    rng = random.Random(3)
    with (
        stack(workers=0, max_queued_requests=8) as (router, _, client),
        wire.Link(router.server.worker_address) as worker,
    ):
        hello = wire.encode(register("w0", incarnation=5, num_states=8))
        worker.send(hello)
        eventually(lambda: len(router.server.core.workers))
        asker, runs = Client(router.server.client_address), [0]
        for step in range(number):
            for order in map(_order.decode, worker.drain()):
                if isinstance(order, Run):
                    runs = [*runs[-3:], order.id]
                elif isinstance(order, Unknown):
                    worker.send(hello)
            if rng.random() < 0.05:
                worker.send(hello)
            sampling = Sampling(max_tokens=8, logprobs=rng.choice((None, 2)))
            client.send(Generate(id=step, prompt=PROMPT, stream=rng.random() < 0.5, sampling=sampling))
            finish = rng.choice((None, None, "stop", "length", "error"))
            output = Output(rng.choice(runs), [5], finish, 1, [LOGPROB], rng.choice((None, [-1.0])), 5)
            events = rng.sample(EVENTS, rng.randrange(4))
            done = StepDone([output], Load(1, 1, 5, 100, 0, 200, 10.0, 0.1), 0, events, rng.random() < 0.5)
            worker.send(next(mutated([done], 1, step)))
            client.link.drain()
            if step % 20 == 0:
                assert asker.ask(Ask(id=step, what="health")).data, "it is served, and has read what came before"
        asker.link.close()
    assert router.server.core.counters.finished and not faults(caplog)
