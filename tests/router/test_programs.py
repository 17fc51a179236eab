"""States over real sockets: what follows them, whose they are, and what becomes of them."""

from __future__ import annotations

import asyncio
import threading
from array import array
from contextlib import nullcontext
from unittest.mock import patch

import pytest
from sim_workers import continuation
from stack import Client, stack

from radixrt.config import RouterConfig
from radixrt.messages import (
    Ask,
    AssistantTurnStart,
    Cancel,
    ChoiceSegment,
    Deltas,
    Done,
    Error,
    Forget,
    Fork,
    Generate,
    GeneratedSegment,
    Grammar,
    Info,
    MessageSegment,
    Namespace,
    Pause,
    Recall,
    Sampling,
    Score,
    Scored,
    Share,
    StatePrompt,
    TextPrompt,
    TextSegment,
    Tokenize,
)
from radixrt.router.core.core import RouterCore
from radixrt.router.programs import programs, prompt_builder
from radixrt.router.programs.prompt_builder import NOTHING, PromptBuilder
from radixrt.router.programs.state_store import Key
from radixrt.router.server.loop import RouterServer
from radixrt.tokens import TextService, load_tokenizer
from tests.checkpoints import make_tokenizer
from tests.waiting import eventually

SCOPE = "0123456789abcdef"
EIGHT = Sampling(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    tokenizer = load_tokenizer(str(make_tokenizer(tmp_path_factory.mktemp("tokenizer"))), "")
    with TextService(tokenizer) as service:
        yield service


@pytest.fixture(autouse=True)
def small_vocabulary(monkeypatch):
    monkeypatch.setattr("sim_workers.next_token", lambda last, position: 3 + (last * 31 + position * 7) % 500)


@pytest.fixture
def running(text):
    with stack(text, workers=2) as (router, _, client):
        yield router.server, client


def say(*texts: str, **fields) -> StatePrompt:
    return StatePrompt(SCOPE, transcript=[TextSegment(text) for text in texts], **fields)


def ask(client: Client, id: int, prompt: StatePrompt, **fields):
    """The one Delta, or the Error."""
    answer = client.ask(Generate(id=id, prompt=prompt, sampling=fields.pop("sampling", EIGHT), stream=False, **fields))
    return answer.items[0] if isinstance(answer, Deltas) else answer


def ask_later(client: Client, id: int, prompt: StatePrompt):
    """`ask`, with messages that were asked before still to be answered by Done."""
    client.send(Generate(id=id, prompt=prompt, sampling=EIGHT, stream=False))
    while isinstance(answer := client.receive(), Done):
        pass
    return answer.items[0] if isinstance(answer, Deltas) else answer


def states_of(client: Client) -> int:
    client.send(Ask(id=99, what="health"))
    while not isinstance(answer := client.receive(), Info):  # what was said before it arrives before it
        pass
    return answer.data["states"]


def test_what_follows_a_state(running, text):
    server, client = running
    first = ask(client, 1, say("Tell me", save=1))
    begin = text.encode_now(TextPrompt("Tell me"))
    assert list(array("i", first.ids)) == continuation(begin, 8)
    second = ask(client, 2, say(" more", state=1, save=2))
    whole = begin + first.ids + text.encode_part(TextPrompt(" more"))
    assert second.usage.prompt_tokens == len(whole) // 4
    assert second.usage.cached_tokens == len(begin + first.ids) // 4 - 1
    assert list(array("i", second.ids)) == continuation(whole, 8)
    # An earlier state still stands; a number that is used again stands for what was said last.
    again = ask(client, 3, say(" else", state=1, save=2))
    assert again.usage.prompt_tokens == len(begin + first.ids + text.encode_part(TextPrompt(" else"))) // 4
    assert ask(client, 4, say(state=2)).usage.prompt_tokens == again.usage.prompt_tokens + 8
    assert server.programs.states.get(Key("default", SCOPE, 2)).parts[-1].text == " else"
    assert ask(client, 5, say(" on", state=2, save=3, replaces=True)).finish == "length"
    assert ask(client, 6, say(state=2)).code == 410 and states_of(client) == 2


def test_streams_and_scores_are_kept_too(running, text):
    server, client = running
    client.send(Generate(id=1, prompt=say("Is it", save=1), sampling=EIGHT))
    ((_, delta),) = client.gather(1).items()
    choices = [TextPrompt(" yes", False), TextPrompt(" no", False)]
    scored = client.ask(Score(id=2, prompt=say(" so?", state=1, save=2), choices=choices))
    assert isinstance(scored, Scored) and len(scored.logprobs) == 2
    prompt = StatePrompt(SCOPE, 2, [ChoiceSegment(" no"), TextSegment(" because")], save=3)
    parts = [" so?", " no", " because"]
    tokens = len(text.encode_now(TextPrompt("Is it")) + delta.ids) // 4
    tokens += sum(len(text.encode_part(TextPrompt(part))) // 4 for part in parts)
    assert ask(client, 3, prompt).usage.prompt_tokens == tokens


def test_a_stop_string_that_cut_the_answer(running, text):
    _, client = running
    whole = ask(client, 1, say("Tell me"), sampling=Sampling(max_tokens=30, ignore_eos=True))
    stop = whole.text[8:10]
    cut = ask(client, 2, say("Tell me", save=1), sampling=Sampling(max_tokens=30, ignore_eos=True, stop=(stop,)))
    assert cut.stop == stop and cut.text == whole.text[: whole.text.index(stop)]
    answer = GeneratedSegment(cut.ids, cut.text, cut.stop, Sampling(stop=(stop,)))
    told = ask(client, 3, StatePrompt(SCOPE, 0, [TextSegment("Tell me"), answer, TextSegment(" and")]))
    kept = ask(client, 4, say(" and", state=1))
    assert kept.usage.prompt_tokens == told.usage.prompt_tokens and kept.ids == told.ids


def test_a_fork_is_kept_at_once_and_what_follows_waits_for_it(running, text):
    """Nobody waits for the answer to a Fork: long text is encoded in a thread, and requests come before it is."""
    _, client = running
    trunk = "The quick brown fox again and again. " * 100
    client.send(Fork(id=1, prompt=say(trunk, save=1), count=3))
    client.send(Fork(id=2, prompt=say(" deeper", state=1, save=2), count=2))
    client.send(*(Generate(id=10 + i, prompt=say(f" {i}", state=2), sampling=EIGHT, stream=False) for i in range(2)))
    got = [client.receive() for _ in range(4)]
    assert {message.id for message in got if isinstance(message, Done)} == {1, 2}
    deltas = {delta.id: delta for message in got if isinstance(message, Deltas) for delta in message.items}
    for i in range(2):
        tokens = len(text.encode_now(TextPrompt(f"{trunk} deeper {i}"))) // 4
        assert deltas[10 + i].usage.prompt_tokens == tokens, "text that no prompt ended in goes on"
    assert client.ask(Fork(id=3, prompt=say(state=7, save=8), count=2)).code == 410
    assert client.ask(Fork(id=4, prompt=say("x"), count=2)).field == "prompt.save"


def test_what_keeps_its_answer_under_the_forks_own_number_waits_too(running):
    _, client = running
    client.send(Fork(id=1, prompt=say("The quick brown fox again and again. " * 100, save=1), count=2))
    again = ask_later(client, 2, say(" deeper", state=1, save=1, replaces=True))
    assert again.finish == "length"


def test_an_answer_does_not_bring_back_what_is_forgotten(running):
    """It ends behind a Forget of its scope; nobody will ask for it."""
    _, client = running
    client.send(Generate(id=1, prompt=say("x", save=1), sampling=EIGHT, stream=False))
    assert client.ask(Forget(id=2, scope=SCOPE)) == Done(2)
    assert client.receive().items[0].finish == "length"
    assert states_of(client) == 0


def test_nor_one_whose_grammar_was_tried_out_meanwhile(running):
    _, client = running
    schema = Grammar("json_schema", '{"type":"object","properties":{"seldom":{"type":"string"}}}')
    sampling = Sampling(max_tokens=8, ignore_eos=True, grammar=schema)
    client.send(Generate(id=1, prompt=say("x", save=1), sampling=sampling, stream=False), Forget(id=2, scope=SCOPE))
    client.receive(), client.receive()
    assert states_of(client) == 0


def test_another_tenant_forgets_nothing_of_it(text):
    with stack(text, api_key=("a:key-a", "b:key-b")) as (_, _, client):
        asked = Generate(id=1, prompt=say("x", save=1), sampling=EIGHT, stream=False, api_key="key-a")
        client.send(asked, Forget(id=2, scope=SCOPE, api_key="key-b"))
        client.receive(), client.receive()
        assert ask(client, 3, StatePrompt(SCOPE, 1), api_key="key-a").finish == "length"


def test_what_is_forgotten_while_it_is_put_together_does_not_come_back(running):
    _, client = running
    client.send(Fork(id=1, prompt=say("The quick brown fox again. " * 200, save=1), count=3), Forget(id=2, scope=SCOPE))
    assert {client.receive().id, client.receive().id} == {1, 2}
    assert states_of(client) == 0


def test_what_frees_something_is_never_refused_for_what_is_in_flight(text):
    with stack(text, max_queued_requests=1) as (_, _, client):
        assert ask(client, 1, say("The quick brown fox", save=1)).finish == "length"
        long = Sampling(max_tokens=4000, ignore_eos=True)
        client.send(Generate(id=2, prompt=say("again"), sampling=long, stream=False))
        refused = ask(client, 3, say("and again"))
        assert refused.code == 429
        assert isinstance(client.ask(Forget(id=4, scope=SCOPE)), Done)
        assert states_of(client) == 0


def test_nobody_reaches_anothers_state(text):
    with stack(text, api_key=("a:key-a", "b:key-b")) as (_, _, client):
        assert ask(client, 1, say("secret", save=1), api_key="key-a").finish == "length"
        for id, key, scope in ((2, "key-b", SCOPE), (3, "key-a", SCOPE[::-1])):
            refused = ask(client, id, StatePrompt(scope, 1), api_key=key)
            never = ask(client, id, StatePrompt("f" * 16, 1), api_key=key)
            assert (refused.code, refused.field) == (410, "prompt.state") and refused == never, "as if there were none"
        assert client.ask(Pause(id=4, scope=SCOPE, state=1, api_key="key-b")).code == 410
        assert isinstance(client.ask(Forget(id=5, scope=SCOPE, api_key="key-b")), Done)
        assert ask(client, 6, say(state=1), api_key="key-a").finish == "length"
        assert isinstance(client.ask(Forget(id=7, scope=SCOPE, api_key="key-a")), Done)
        assert ask(client, 8, say(state=1), api_key="key-a").code == 410
        assert client.ask(Forget(id=9, scope=SCOPE)).code == 401


def test_what_fails_or_is_cancelled_is_not_kept(running):
    server, client = running
    assert ask(client, 1, say("x", save=1), sampling=Sampling(top_p=3.0)).field == "top_p"
    client.send(Generate(id=2, prompt=say("x", save=2), sampling=Sampling(max_tokens=4000, ignore_eos=True)))
    client.receive()
    client.send(Cancel(2))
    client.send(Score(id=3, prompt=say("x", save=3), choices=[TextPrompt("y")]), Cancel(3))
    assert states_of(client) == 0
    assert [ask(client, 10 + n, say(state=n)).code for n in (1, 2, 3)] == [410] * 3
    assert server._streams._texts == {}


@pytest.mark.parametrize(
    "request_, code, field",
    [
        (Generate(id=1, prompt=say(state=5)), 410, "prompt.state"),
        (Generate(id=1, prompt=say("x", save=1), n=2), 400, "prompt.save"),
        (Generate(id=1, prompt=say("x", save=1), text=False), 400, "prompt.save"),
        (Generate(id=1, prompt=say()), 400, "prompt"),
        (Generate(id=1, prompt=StatePrompt("short", 0)), 400, "prompt.scope"),
        (Generate(id=1, prompt=say("x", save=-1)), 400, "prompt.save"),
        (Score(id=1, prompt=say("x"), choices=[TextPrompt("")]), 400, "choices[0]"),
        (Fork(id=1, prompt=say("x", save=1), count=0), 400, "count"),
        (Pause(id=1, scope=SCOPE, state=3), 410, "state"),
        (Pause(id=1, scope=SCOPE, state=0, seconds=0.0), 400, "seconds"),
        (Pause(id=1, scope=SCOPE, state=0, seconds=float("nan")), 400, "seconds"),
        (Tokenize(id=1, prompt=say("x")), 400, "prompt.type"),
    ],
)
def test_what_is_refused_names_the_field(running, request_, code, field):
    _, client = running
    error = client.ask(request_)
    assert isinstance(error, Error) and (error.code, error.id) == (code, 1)
    assert error.field == field, error
    assert states_of(client) == 0


def test_a_pause_ends_also_where_the_state_is_gone(running):
    server, client = running
    ask(client, 1, say("x", save=1))
    assert isinstance(client.ask(Pause(id=2, scope=SCOPE, state=1)), Done) and len(server.core.pauses) == 1
    server.programs.states.drop(Key("default", SCOPE, 1))
    assert ask(client, 3, say(state=1, resumes=True)).code == 410 and len(server.core.pauses) == 0


def test_ids_alone_have_no_states():
    with stack() as (_, _, client):
        assert ask(client, 1, say("x", save=1)).field == "prompt"
        assert client.ask(Generate(id=2, prompt=StatePrompt(SCOPE, transcript=[TextSegment("")]))).field == "prompt"


def test_much_that_is_said_holds_up_nobody(text):
    """Each choice that was taken renders the chat once more: that is not done on the event loop."""
    short = [MessageSegment("user", "hi"), AssistantTurnStart()]
    assert programs._is_short(NOTHING, short)
    assert not programs._is_short(NOTHING, [*short, *[ChoiceSegment("")] * 1000])
    assert not programs._is_short(NOTHING, [MessageSegment("x" * 1000, ""), AssistantTurnStart()])
    builder = PromptBuilder(NOTHING, text)
    builder.add([MessageSegment("user", "hi " * 12_000), AssistantTurnStart()])
    builder.prompt()
    assert not programs._is_short(builder.state(), [TextSegment("x")]), "the template may write it anew"


def test_a_stop_string_that_no_answer_has_costs_little(running, text, monkeypatch):
    _, client = running
    decoded = []
    decode = TextService.decode_now
    monkeypatch.setattr(TextService, "decode_now", lambda self, ids: decoded.append(len(ids) // 4) or decode(self, ids))
    monkeypatch.setattr(prompt_builder, "MAX_DECODED_TOKENS", 5000)
    ids = text.encode_now(TextPrompt("The quick brown fox. " * 50))
    answer = GeneratedSegment(ids, "something else", "z" * 100_000, Sampling())
    delta = ask(client, 1, StatePrompt(SCOPE, 0, [TextSegment("x"), answer]))
    parts = [text.encode_now(TextPrompt("x")), text.encode_part(TextPrompt("something else"))]
    assert delta.usage.prompt_tokens == sum(map(len, parts)) // 4, "its text is encoded anew"
    assert 4000 < sum(decoded) <= 5000


def test_a_pause_ends_also_where_the_request_is_cancelled_while_it_is_encoded(running, monkeypatch):
    server, client = running
    ask(client, 1, say("x", save=1))
    client.ask(Pause(id=2, scope=SCOPE, state=1))
    began = threading.Event()

    async def never(*_) -> None:
        began.set()
        await asyncio.sleep(60)

    monkeypatch.setattr(server.programs, "prompt", never)
    client.send(Generate(id=3, prompt=say(state=1, resumes=True)))
    assert began.wait(5)
    client.send(Cancel(3))
    eventually(lambda: len(server.core.pauses) == 0)


def test_messages_that_are_worked_on_are_bounded_in_bytes(running, monkeypatch):
    """For a tenant, however many clients it has; one may be as large as a message may be."""
    server, client = running

    async def never(*_) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(server.programs, "prompt", never)
    monkeypatch.setattr("radixrt.router.server.tasks.MAX_TENANT_BYTES", 10_000)
    client.send(Generate(id=1, prompt=say("y" * 20_000)))
    refused = client.ask(Generate(id=2, prompt=say("y")))
    assert refused.code == 429 and "too many bytes" in refused.message
    client.send(Cancel(1))
    for id, size in ((3, 6000), (4, 3000)):
        client.send(Generate(id=id, prompt=say("y" * size)))
    assert client.ask(Generate(id=5, prompt=say("y" * 3000))).code == 429
    for id in (3, 4):
        client.send(Cancel(id))
    eventually(lambda: not server._handlers.busy)


@pytest.mark.parametrize("message", ["generate", "score", "fork"])
@pytest.mark.parametrize("ends", ["cancel", "drop", "unknown", "same id", "too many", "choices"])
def test_a_pause_ends_once_whatever_becomes_of_the_message(text, message, ends):
    """Also where a Cancel comes with it, before anything of it was done. Of two that pause, the other one waits on."""
    with stack(text) as (router, _, client):
        server = router.server
        ask(client, 1, say("x", save=1))
        for id in (2, 3):
            assert isinstance(client.ask(Pause(id=id, scope=SCOPE, state=1)), Done)
        if ends == "unknown":
            server.programs.states.drop(Key("default", SCOPE, 1))
        prompt = say("y" * (1000 if ends == "cancel" else 1), state=1, save=2, resumes=True)
        messages = {
            "generate": Generate(id=4, prompt=prompt, sampling=Sampling(top_p=3.0) if ends == "choices" else EIGHT),
            "score": Score(id=4, prompt=prompt, choices=[TextPrompt("" if ends == "choices" else "z")]),
            "fork": Fork(id=4, prompt=prompt, count=3),
        }

        async def all_at_once() -> None:
            here = server.attach(lambda _: None)
            if ends == "same id":
                server.take(here, Tokenize(id=4, prompt=TextPrompt("x")))
            full = patch.object(RouterCore, "runs_in_flight", server.config.max_queued_requests)
            with full if ends == "too many" else nullcontext():
                server.take(here, messages[message])
            if ends == "cancel":
                server.take(here, Cancel(4))
            if ends == "drop":
                server._perform(server._handlers.drop(here))
            await asyncio.sleep(0.05)

        asyncio.run_coroutine_threadsafe(all_at_once(), router._loop).result(5)
        assert len(server.core.pauses) == server.core.pauses.waiting(Key("default", SCOPE, 1)) == 1
        assert not server._handlers._tasks._resuming


def test_a_value_that_is_shared_is_recalled_once(running):
    _, client = running
    assert isinstance(client.ask(Share(id=1, entries=[(b"k", b"v" * 1000)])), Done)
    assert client.ask(Recall(id=2, keys=[b"k", b"x"])).data == [b"v" * 1000, None]
    assert client.ask(Recall(id=3, keys=[b"k"] * 2)).field == "keys"


def test_ids_that_the_tokenizer_does_not_have_do_not_break_the_report(text):
    """A model may take more than the tokenizer makes."""
    server = RouterServer(RouterConfig(), text)
    for i in range(20):
        ids = array("i", [600, 601 + i, *range(3, 500)])
        server.report.arrived(Namespace("default", "m").key, ids.tobytes(), "default")
    answers = []

    async def ask_it() -> None:
        server.take(server.attach(answers.append), Ask(id=1, what="report"))
        await asyncio.sleep(0)

    asyncio.run(ask_it())
    (row,) = answers[0].data["volatile"]
    assert row["before"] == "" and row["after"] and row["values"] == ["", ""]
