"""The router over real sockets: text in and out, garbage, slow and vanished clients, lost workers."""

from __future__ import annotations

import asyncio
import time
from array import array

import msgspec
import pytest
from sim_workers import continuation, ids, register
from stack import Client, Worker, stack

from radixrt import wire
from radixrt.config import RouterConfig
from radixrt.messages import (
    Abort,
    Ask,
    Cancel,
    ChatPrompt,
    Deltas,
    Detokenize,
    Error,
    Generate,
    Info,
    Leave,
    Load,
    Output,
    Sampling,
    Score,
    Scored,
    StepDone,
    Stop,
    TextPrompt,
    Tokenize,
    TokenPrompt,
    Tokens,
    ToWorker,
    Unknown,
)
from radixrt.router.core.effects import Order
from radixrt.router.server.connections import MAX_BATCH_MESSAGES
from radixrt.router.server.loop import NAME_TAKEN, RouterServer
from radixrt.tokens import TextService
from tests.waiting import eventually

PROMPT = ids(5, 6, 7)


def generate(id: int, prompt=PROMPT, max_tokens=8, **fields) -> Generate:
    prompt = TextPrompt(prompt) if isinstance(prompt, str) else TokenPrompt(prompt)
    return Generate(id=id, prompt=prompt, sampling=Sampling(max_tokens=max_tokens), **fields)


def test_the_context_length_and_the_room_of_a_worker_are_logged(caplog):
    caplog.set_level("INFO")
    with stack():
        pass
    assert "worker w0 serves m on cpu; contexts of up to 4096 tokens, KV pages for 100000, 24.4 full" in caplog.text


@pytest.mark.parametrize("transport", ["inproc", "ipc", "tcp"])
def test_many_streams_at_once(transport, tmp_path):
    addresses = {
        "inproc": {},
        "ipc": {"client_address": f"ipc://{tmp_path}/c", "worker_address": f"ipc://{tmp_path}/w"},
        "tcp": {"client_address": "tcp://127.0.0.1:*", "worker_address": "tcp://127.0.0.1:*"},
    }[transport]
    with stack(workers=2, **addresses) as (_, _, client):
        prompts = [ids(*range(1, 2 + i % 17)) for i in range(60)]
        client.send(*(generate(i, prompt, stream=i % 2 == 0) for i, prompt in enumerate(prompts)))
        for (id, _), delta in client.gather(60).items():
            assert list(array("i", delta.ids)) == continuation(prompts[id], 8)
            assert delta.finish == "length" and delta.usage.worker in ("w0", "w1")
            assert delta.usage.prompt_tokens == len(prompts[id]) // 4


def test_a_worker_that_dies_while_it_streams_costs_no_token():
    with stack(workers=2, worker_timeout=0.5) as (router, workers, client):
        client.send(*(generate(i, ids(i + 1), 300) for i in range(10)))
        eventually(lambda: router.server.core.counters.requests == 10)
        time.sleep(0.1)
        workers[0].die()
        for (id, _), delta in client.gather(10).items():
            assert list(array("i", delta.ids)) == continuation(ids(id + 1), 300)
            assert delta.usage.worker == "w1"
        assert router.server.core.counters.redispatched > 0


def test_a_long_answer_outlives_any_number_of_planned_restarts():
    with stack(workers=1) as (router, workers, client):
        client.send(generate(1, max_tokens=400))
        with wire.Link(router.server.worker_address) as link:
            for n in range(1, 5):
                client.receive()
                workers[-1].die()
                link.send(wire.encode(Leave(f"w{n - 1}", "stopped", planned=True)))
                workers.append(Worker(router.server.worker_address, f"w{n}"))
                eventually(lambda n=n: [member.name for member in router.server.core.workers] == [f"w{n}"])
        (delta,) = client.gather(1).values()
        assert delta.finish == "length" and delta.usage.completion_tokens == 400
        assert router.server.core.counters.redispatched == 4


def test_the_last_worker_dies_and_another_comes():
    with stack(workers=1, worker_timeout=0.5) as (router, workers, client):
        client.send(generate(1, max_tokens=200))
        client.receive()
        workers[0].die()
        eventually(lambda: len(router.server.core.workers) == 0)
        client.send(generate(2))
        while isinstance(answer := client.receive(), Deltas):  # what w0 had said is on its way
            assert {delta.id for delta in answer.items} == {1}
        assert answer.code == 503
        workers.append(Worker(router.server.worker_address, "w9"))
        (delta,) = client.gather(1).values()
        assert continuation(PROMPT, 200)[-100:] == list(array("i", delta.ids))[-100:]


@pytest.mark.parametrize(
    ("payload", "id", "field"),
    [
        (b"", None, ""),
        (b"\xc1garbage", None, ""),
        (msgspec.msgpack.encode([1, 2]), None, ""),
        (msgspec.msgpack.encode({"type": "unknown", "id": 7}), 7, "type"),
        (msgspec.msgpack.encode({"type": "generate", "id": 7}), 7, ""),
        (msgspec.msgpack.encode({"type": "generate", "id": 7, "prompt": {"type": "ids", "ids": 3}}), 7, "prompt.ids"),
        (wire.encode(generate(7)) + b"more", None, ""),
    ],
)
def test_garbage_gets_an_error_and_disturbs_nobody(payload, id, field):
    with stack() as (router, _, client):
        client.send(generate(1, max_tokens=100))
        client.receive()
        mallory = Client(router.server.client_address)
        mallory.link.send(payload)
        error = mallory.receive()
        assert isinstance(error, Error) and error.code == 400 and (error.id, error.field) == (id, field)
        assert "malformed" in error.message
        mallory.link.close()
        (delta,) = client.gather(1).values()
        assert delta.finish == "length"


def test_garbage_from_a_worker_disturbs_nobody():
    with stack() as (router, _, client):
        with wire.Link(router.server.worker_address, b"bad") as link:
            for payload in (b"", b"\xff" * 40, wire.encode(generate(1)), wire.encode({"type": "step"})):
                link.send(payload)
            client.send(generate(1))
            assert client.gather(1)


def test_nobody_takes_the_name_of_a_worker_that_serves(caplog):
    """Nor its runs; the other one is told to stop. Once it is gone, whoever comes first has the name."""
    with stack(worker_timeout=60.0) as (router, workers, client):
        client.send(generate(1, max_tokens=300))
        client.receive()
        with wire.Link(router.server.worker_address) as link:
            for _ in range(2):
                link.send(wire.encode(register("w0", pid=2)))
                assert wire.Decoder(ToWorker).decode(link.recv(5.0)) == Stop(NAME_TAKEN)
            link.send(wire.encode(StepDone([Output(1, [666])], Load())))
            (delta,) = client.gather(1).values()
            assert continuation(PROMPT, 300)[-100:] == list(array("i", delta.ids))[-100:]
            assert [record.levelname for record in caplog.records] == ["ERROR"] * 2
            workers[0].die()

            def joins() -> bool:
                link.send(wire.encode(register("w0", pid=2)))
                return [member.info.pid for member in router.server.core.workers] == [2]

            eventually(joins)


def test_a_worker_that_nobody_knows_is_told_again_in_time(monkeypatch):
    """What it was told, or its answer, may be lost with a connection."""
    monkeypatch.setattr("radixrt.router.server.connections.REFUSED_SECONDS", 0.1)
    with stack(workers=0) as (router, _, _):
        with wire.Link(router.server.worker_address, b"earlier") as link:
            for _ in range(2):
                link.send(wire.encode(StepDone([], Load())))
                assert wire.Decoder(ToWorker).decode(link.recv(5.0)) == Unknown()
                time.sleep(0.11)


def test_a_worker_that_nobody_knows_is_told_so_once():
    with stack(workers=0) as (router, _, _):
        with wire.Link(router.server.worker_address, b"earlier") as link:
            for _ in range(3):
                link.send(wire.encode(StepDone([], Load())))
            assert wire.Decoder(ToWorker).decode(link.recv(5.0)) == Unknown()
            link.send(wire.encode(register("w0")))
            eventually(lambda: len(router.server.core.workers) == 1)
            router.server.core.workers.remove("w0", may_return=False)
            link.send(wire.encode(StepDone([], Load())))
            assert wire.Decoder(ToWorker).decode(link.recv(5.0)) == Unknown(), "it had registered since"
            assert link.recv(0.05) is None


def test_cancel_frees_the_worker():
    with stack() as (router, workers, client):
        client.send(generate(1, max_tokens=4000), generate(2, max_tokens=30))
        client.receive()
        client.send(Cancel(1))
        eventually(lambda: len(router.server.core.in_flight(next(iter(router.server.core._requests), b""))) <= 1)
        eventually(lambda: not workers[0].sim.sequences)
        eventually(lambda: router.server.core.runs_in_flight == 0)


def test_a_cancel_with_a_negative_count_is_refused_and_changes_nothing():
    with stack(pace=0.01) as (router, _, client):
        client.send(generate(1, max_tokens=60))
        client.receive()
        client.send(Cancel(1, 0, tokens=-3), Cancel(1, 7, tokens=1), Cancel(1, -1, tokens=1))
        answers: list = []
        while not any(isinstance(answer, Error) for answer in answers):
            answers.append(client.receive())
        refusal = answers[-1]
        assert (refusal.id, refusal.code, refusal.field) == (1, 400, "tokens")
        (whole,) = client.gather(1).values()
        assert (whole.finish, whole.usage.completion_tokens) == ("length", 60)
        assert router.server.core.counters.generated_tokens == 60


def test_a_client_that_vanishes_is_cancelled(monkeypatch):
    monkeypatch.setattr("radixrt.router.core.core.KEEPALIVE_SECONDS", 0.1)
    with stack(worker_timeout=0.5, pace=0.02) as (router, workers, client):
        ghost = Client(router.server.client_address)
        ghost.send(generate(1, max_tokens=4000, stream=False), generate(2, max_tokens=4000))
        eventually(lambda: len(workers[0].sim.sequences) == 2)
        ghost.link.close()
        eventually(lambda: not workers[0].sim.sequences)
        client.send(generate(1))
        assert client.gather(1)


def test_a_client_that_does_not_read_loses_its_requests_and_is_told(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr("radixrt.wire.sockets.HIGH_WATER", 5)
    with stack(worker_timeout=0.5, pace=0.0005, client_address=f"ipc://{tmp_path}/c") as (router, _, client):
        deaf = Client(router.server.client_address)
        big = Sampling(max_tokens=3000, logprobs=None)
        deaf.send(*(Generate(id=i, prompt=TokenPrompt(PROMPT), sampling=big) for i in range(4)))
        deaf.send(*(Ask(id=100 + i, what="health") for i in range(4)))
        eventually(lambda: router.server.core.counters.cancelled >= 4, 20)
        assert caplog.text.count("does not read its replies") == 1
        client.send(generate(1))
        assert client.gather(1)
        told = set()
        while len(told) < 4:
            message = deaf.receive()
            if isinstance(message, Error):
                assert message.code == 503 and "did not read" in message.message
                told.add(message.id)
        deaf.link.close()


def test_api_keys_and_questions():
    with stack(api_key=("acme:s3cret",)) as (_, _, client):
        health = client.ask(Ask(id=1, what="health"))
        assert isinstance(health, Info) and health.data["serving"] and health.data["workers"][0]["name"] == "w0"
        assert client.ask(Ask(id=2, what="models")).data == [{"id": "m", "max_model_len": 4096}]
        assert client.ask(Ask(id=3, what="report")).code == 401
        assert client.ask(generate(4)).code == 401
        assert client.ask(Tokenize(id=5, prompt=TokenPrompt(PROMPT))).code == 401
        client.send(generate(6, api_key="s3cret"))
        assert client.gather(1)


def test_errors_name_the_field_and_carry_the_id():
    with stack() as (_, _, client):
        for request, code, field in [
            (generate(1, b""), 400, "prompt"),
            (generate(2, model="gpt"), 404, "model"),
            (generate(3, max_tokens=-1), 400, "max_tokens"),
            (generate(4, "text"), 400, "prompt"),
            (Generate(id=5, prompt=TokenPrompt(PROMPT), sampling=Sampling(stop=("x",))), 400, "stop"),
            (Detokenize(id=6, ids=PROMPT), 400, "ids"),
        ]:
            error = client.ask(request)
            assert isinstance(error, Error) and (error.id, error.code, error.field) == (request.id, code, field)


# ------------------------------------------------------------ text


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    from radixrt.tokens import TextService, load_tokenizer
    from tests.checkpoints import make_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    with TextService(load_tokenizer(folder)) as service:
        yield service


def test_text_in_text_out(service):
    with stack(service) as (_, _, client):
        client.send(generate(1, "the quick brown fox"), generate(2, "the quick brown fox " * 200, stream=False))
        whole = client.gather(2)
        for id, text in ((1, "the quick brown fox"), (2, "the quick brown fox " * 200)):
            delta = whole[id, 0]
            prompt = array("i", service.tokenizer.encode(text)).tobytes()
            assert list(array("i", delta.ids)) == continuation(prompt, 8)
            assert delta.text == service.tokenizer.decode(continuation(prompt, 8))


def test_tokenize_detokenize(service):
    with stack(service) as (_, _, client):
        tokens = client.ask(Tokenize(id=1, prompt=TextPrompt("hello world")))
        assert isinstance(tokens, Tokens) and list(array("i", tokens.ids)) == service.tokenizer.encode("hello world")
        assert client.ask(Detokenize(id=2, ids=tokens.ids)).text == service.tokenizer.decode(array("i", tokens.ids))
        assert client.ask(generate(3, "")).field == "prompt"
        broken = Generate(id=4, prompt=ChatPrompt(messages=[{"role": 3}]))
        assert client.ask(broken).code == 400


def test_scored_text_choices(service):
    with stack(service) as (_, _, client):
        choices = [TextPrompt(" yes"), TextPrompt(" no, thanks")]
        scored = client.ask(Score(id=1, prompt=TextPrompt("is it?"), choices=choices))
        assert isinstance(scored, Scored)
        assert scored.logprobs == [[float(t) for t in array("i", service.encode_part(c))] for c in choices]
        assert client.ask(Score(id=2, prompt=TextPrompt("x"), choices=[TextPrompt("")])).field == "choices[0]"


def test_cancel_while_the_text_is_encoded(service):
    with stack(service) as (router, workers, client):
        client.send(generate(1, "a b c " * 2_500), Cancel(1), generate(2))
        assert set(client.gather(1)) == {(2, 0)}
        eventually(lambda: not router.server._handlers._tasks)
        assert router.server.core.counters.requests == 1


def test_nothing_is_left_of_a_client_that_has_vanished(service):
    """One request of it is at a worker, another is being encoded."""
    with stack(service) as (router, workers, _):
        server = router.server

        async def come_and_go() -> None:
            here = server.attach(lambda _: None)
            for request in (generate(1, max_tokens=4000), generate(2, "a b c " * 100_000)):
                server.take(here, request)
            assert server._streams._texts and server._handlers._tasks
            server._perform(server._handlers.drop(here))
            assert not server._streams._texts and not server._handlers._tasks

        asyncio.run_coroutine_threadsafe(come_and_go(), router._loop).result(5)
        eventually(lambda: not workers[0].sim.sequences)
        assert server.core.runs_in_flight == 0 and server.core.counters.requests == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_a_stop_string_ends_the_choice_everywhere(service, stream, include, monkeypatch):
    """The stop lies across tokens of the known continuation; the worker is told, and the usage is right."""
    prompt = ids(5, 6, 7)
    monkeypatch.setattr("sim_workers.next_token", lambda last, position: position % 50 + 100)
    whole = service.tokenizer.decode(continuation(prompt, 40))
    stop = whole[20:24]
    sampling = Sampling(max_tokens=4000, stop=(stop,), include_stop=include)
    with stack(service) as (router, workers, client):
        client.send(Generate(id=1, prompt=TokenPrompt(prompt), sampling=sampling, n=2, stream=stream))
        for delta in client.gather(2).values():
            end = whole.find(stop) + (len(stop) if include else 0)
            assert delta.text == whole[:end] and delta.finish == "stop" and delta.stop == stop
            assert delta.usage.completion_tokens == len(delta.ids) // 4 <= 40  # and not at the length
        eventually(lambda: not workers[0].sim.sequences)
        assert router.server.core.runs_in_flight == 0 and router.server._streams._texts == {}


def test_an_id_that_is_taken_does_not_disturb_who_has_it(service, monkeypatch):
    monkeypatch.setattr("sim_workers.next_token", lambda last, position: position % 50 + 100)
    whole = service.tokenizer.decode(continuation(PROMPT, 40))
    stop = whole[20:24]
    request = Generate(id=1, prompt=TokenPrompt(PROMPT), sampling=Sampling(max_tokens=4000, stop=(stop,)))
    with stack(service) as (_, _, client):
        client.send(request, request)
        said, refused, finish = "", [], None
        while not finish:
            message = client.receive()
            if isinstance(message, Error):
                refused.append(message.message)
            else:
                said += "".join(delta.text for delta in message.items)
                finish = message.items[-1].finish
        assert (said, finish) == (whole[: whole.find(stop)], "stop")
        assert refused == ["request id 1 is in flight already"]


def test_text_is_only_for_those_who_want_it(service, monkeypatch):
    monkeypatch.setattr("sim_workers.next_token", lambda last, position: position % 50 + 100)
    with stack(service) as (_, _, client):
        client.send(generate(1, text=False), generate(2))
        whole = client.gather(2)
        assert whole[1, 0].text == "" and whole[1, 0].ids == whole[2, 0].ids and whole[2, 0].text


def test_orders_of_one_turn_go_together(monkeypatch):
    async def main() -> None:
        stop, ready = asyncio.Event(), asyncio.Event()
        names = {"client_address": "inproc://orders-clients", "worker_address": "inproc://orders-workers"}
        server = RouterServer(RouterConfig(tokenizer="none", **names), TextService.none())
        serving = asyncio.create_task(server.run(stop, ready.set))
        await ready.wait()
        sent, lost = [], []
        socket = server._workers._socket
        monkeypatch.setattr(socket, "send", lambda identity, order: sent.append((identity, order)) or True)
        monkeypatch.setattr(server.core, "lose", lambda name, now: lost.append(name) or [])
        server._workers.bind("w", b"1")
        orders = [Abort([number]) for number in range(MAX_BATCH_MESSAGES + 2)]
        for order in orders:
            server._perform([Order("w", order)])
        assert len(sent) == 1 + MAX_BATCH_MESSAGES, "the first does not wait, nor do more than so many"
        await asyncio.sleep(0.01)
        assert sent == [(b"1", wire.encode(order)) for order in orders]
        server._perform([Order("w", Abort([8])), Order("w", Abort([9]))])
        server._workers.bind("w", b"2")
        await asyncio.sleep(0.01)
        assert len(sent) == len(orders) + 1, "a worker's next life gets nothing that was for the one before"
        server._perform([Order("nobody", Abort([1])), Order("nobody", Abort([2])), Order("w", Abort([3]))])
        await asyncio.sleep(0.01)
        assert {name for names in lost for name in names} == {"nobody"} and sent[-1] == (b"2", wire.encode(Abort([3])))
        stop.set()
        await serving

    asyncio.run(main())
