"""Programs on token state: the same prompts as if all were sent every time, and nothing that is sent twice."""

from __future__ import annotations

import asyncio
import runpy
import time
from collections import defaultdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixrt import Branch, Sampling, assistant, gen, program, select, use_client, user
from radixrt.client import AsyncClient, Client
from radixrt.client.local import LocalStack
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.lang.speaker import Speaker
from radixrt.messages import Fork, Generate, Pause, Score, StatePrompt
from radixrt.requests.validate import Refused
from radixrt.router.programs.state_store import Key
from tests.lang.conftest import reached, stack
from tests.lang.oracle import Oracle
from tests.lang.test_examples import EXAMPLES
from tests.waiting import eventually

SHORT = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)


class Recorder:
    """What programs said before each request, and the ids that the router made of it, by branch."""

    def __init__(self, running: LocalStack, monkeypatch) -> None:
        self.server = running._router_thread.server
        self.transcript: dict[str, list] = defaultdict(list)
        self.ids: dict[str, list[bytes]] = defaultdict(list)
        submit, ask = self.server.core.submit, Speaker._request

        def recording_submit(client, message, *rest, **more):
            self.ids[message.origin.branch].append(message.prompt.ids)
            return submit(client, message, *rest, **more)

        def recording_ask(speaker, work):
            self.transcript[speaker._origin.branch].append(list(speaker.history.transcript))
            return ask(speaker, work)

        self.server.core.submit = recording_submit
        monkeypatch.setattr(Speaker, "_request", recording_ask)

    def check(self, client: Client, text) -> int:
        """Every prompt is the reference's; how many there were. What was cancelled may not have reached the router."""
        checked = 0

        async def parts(transcript):
            return await (await Oracle.of(client.aio, transcript)).prompt(client.aio)

        for branch, found in self.ids.items():
            assert len(found) <= len(self.transcript[branch])
            for ids, transcript in zip(found, self.transcript[branch], strict=False):
                assert ids == text.encode_now(client.run(parts(transcript)))
                checked += 1
        self.transcript.clear()
        self.ids.clear()
        return checked


@pytest.fixture
def running(folder):
    with stack(folder) as running, Client(running.address) as client:
        yield running, client


def forgetting(server, every: int) -> None:
    """From now on every so many states that are asked for are unknown."""
    get, asked = server.programs.states.get, 0

    def forgetful(key: Key, field: str = "prompt.state"):
        nonlocal asked
        asked += bool(key.number)
        if key.number and asked % every == 0:
            raise Refused(field, "forgotten", 410)
        return get(key, field)

    server.programs.states.get = forgetful


@pytest.mark.parametrize("every", [0, 1, 3])
def test_examples_send_the_reference_s_prompts(running, monkeypatch, capsys, every):
    """With states, without any, and with some of them forgotten in the middle of a program."""
    running, client = running
    recorder = Recorder(running, monkeypatch)
    if every:
        forgetting(recorder.server, every)
    monkeypatch.setattr("sys.argv", ["example"])
    use_client(client)
    try:
        for example in EXAMPLES:
            runpy.run_path(str(example), run_name="__main__")
            assert recorder.check(client, recorder.server.text) >= 3, example.stem
    finally:
        use_client(None)
    assert capsys.readouterr().out


NODE = st.one_of(
    st.tuples(st.just("say"), st.sampled_from(["Once", " upon a", " time", "ful", " é", "\n"])),
    st.tuples(st.just("gen"), st.tuples(st.integers(1, 6), st.sampled_from(["", "", "e", " ", "a"]))),
    st.tuples(st.just("select"), st.sampled_from([("yes", "no"), (" help", "ful")])),
)
TREE = st.recursive(
    st.tuples(st.lists(NODE, max_size=4), st.just(())),
    lambda below: st.tuples(st.lists(NODE, max_size=4), st.lists(below, min_size=1, max_size=3).map(tuple)),
    max_leaves=6,
)


async def _grow(branch: Branch, tree, roles: bool) -> None:
    nodes, below = tree
    for kind, what in nodes:
        if kind == "say":
            branch += user(what) if roles else what
            continue
        if kind == "gen":
            tokens, stop = what
            node = gen("x", SHORT, max_tokens=tokens, stop=stop or ())
        else:
            node = select("x", what)
        branch += assistant("So:", node, " it is") if roles else node
    if below:
        for child, own in zip(branch.fork(len(below)), below, strict=True):
            await _grow(child, own, roles)
    await branch.wait()


@pytest.mark.parametrize("every", [0, 2])
def test_any_program_sends_the_reference_s_prompts(running, monkeypatch, every):
    running, client = running
    recorder = Recorder(running, monkeypatch)
    if every:
        forgetting(recorder.server, every)

    @settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(tree=TREE, roles=st.booleans())
    def check(tree, roles):
        @program
        async def any_program(s: Branch) -> None:
            s += user("Begin") if roles else "Begin"
            await _grow(s, tree, roles)

        any_program.run(client)
        recorder.check(client, recorder.server.text)

    check()
    client.run(asyncio.sleep(0.02))
    health = client.health()
    assert health["states"] == health["state_bytes"] == 0, "a program that has ended leaves nothing"


# ---------------------------------------------------------------- what is sent


@program
async def long_story(s: Branch, text: str, turns: int) -> list[int]:
    s += text
    found = []
    for turn in range(turns):
        s += f" turn {turn}"
        s += gen("x", SHORT)
        found.append((await s.value("x")).usage.prompt_tokens)
    children = s.fork(3)
    for child in children:
        child += " and"
        child += gen("y", SHORT)
    return found + [(await child.value("y")).usage.prompt_tokens for child in children]


def test_a_step_sends_only_what_is_new(running, monkeypatch):
    """Not a byte for a byte of history, one message for a fork, and one to end."""
    _, client = running
    sent = []
    monkeypatch.setattr("radixrt.wire.encode", _tapped(sent))
    long_story.run(client, "history " * 3000, 4)
    told = [message for message, _ in sent if isinstance(getattr(message, "prompt", None), StatePrompt)]
    sizes = {type(message).__name__: size for message, size in sent[1:] if message in told[1:]}
    assert sum(isinstance(message, Fork) for message in told) == 1
    assert len(told) == 4 + 1 + 3 and sizes["Generate"] < 250 and sizes["Fork"] < 150
    assert all(size < 300 for message, size in sent if message in told[1:])
    assert [message.prompt.replaces for message in told] == [False, True, True, True, True, False, False, False]


def _tapped(sent: list):
    from radixrt import wire

    encode = wire.encode

    def tapped(message):
        payload = encode(message)
        if isinstance(message, Generate | Score | Fork | Pause):
            sent.append((message, len(payload)))
        return payload

    return tapped


def test_states_of_a_running_program_are_few(running):
    """One a branch, and one a fork."""
    _, client = running

    @program
    async def counted(s: Branch) -> list[int]:
        counts = []
        s += "start"
        for _ in range(5):
            s += gen("x", SHORT)
            await s.wait()
            counts.append((await client.aio.health())["states"])
        for child in s.fork(2):
            child += gen("x", SHORT)
            await child.wait()
        return [*counts, (await client.aio.health())["states"]]

    assert counted.run(client) == [1] * 5 + [3]
    client.run(asyncio.sleep(0.02))
    assert client.health()["states"] == 0


def test_a_branch_that_goes_on_leaves_what_its_forks_begin_with(running):
    running, client = running
    states = running._router_thread.server.programs.states
    get, unknown = states.get, []

    def counting(key: Key, field: str = "prompt.state"):
        try:
            return get(key, field)
        except Refused:
            unknown.append(key)
            raise

    states.get = counting

    @program
    async def goes_on(s: Branch) -> None:
        s += "start"
        s += gen("x", SHORT)
        for children in (s.fork(2), s.fork(1)):
            s += gen("y", SHORT)
            await s.wait()
            for child in children:
                child += gen("z", SHORT)
                await child.wait()

    goes_on.run(client)
    assert unknown == []


def test_the_same_over_http(folder, running):
    running, client = running
    with reached("http", folder, running.address) as address, Client(address) as http:
        assert long_story.run(http, "a story", 3) == long_story.run(client, "a story", 3)
        with pytest.raises(Exception, match="not known"):
            http.generate(StatePrompt("0123456789abcdef", 9), SHORT)
        eventually(lambda: not client.health()["states"])


@pytest.mark.parametrize("face", ["plain", "async"])
@pytest.mark.parametrize("transport", ["zmq", "http"])
def test_a_client_that_is_closed_at_once_leaves_no_states(folder, running, transport, face):
    running, other = running

    @program
    async def forks(s: Branch) -> None:
        s += "start"
        s += gen("x", SHORT, max_tokens=2)
        await s.tool(asyncio.sleep, 0.03)
        for child in s.fork(3):
            child += gen("y", SHORT, max_tokens=2)
            child.fork(2)

    async def run_and_close(address: str) -> None:
        async with await AsyncClient.connect(address) as client:
            await forks(client)

    with reached(transport, folder, running.address) as address:
        for _ in range(20):
            if face == "async":
                asyncio.run(run_and_close(address))
            else:
                with Client(address) as client:
                    forks.run(client)
            health = other.health()
            assert (health["states"], health["paused"]) == (0, 0)


def test_a_server_that_reads_nothing_does_not_hold_up_a_close(running):
    running, _ = running
    client = Client(running.address)
    long_story.run(client, "a story", 1)
    running._router_thread.server.take = lambda client, message: None
    client.run(_tell(client.aio, Pause(id=0, scope="0123456789abcdef", state=1)))
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < 3


async def _tell(client: AsyncClient, message: Pause) -> None:
    await client.tell(message)


# ---------------------------------------------------------------- tools


@program
async def patient(s: Branch, flood, seconds: float) -> tuple[int, int, int]:
    s += "the quick brown fox " * 10
    s += gen("x", SHORT)
    before = await s.value("x")
    during = await s.tool(flood, seconds)
    s += " and"
    s += gen("y", SHORT)
    usage = (await s.value("y")).usage
    return usage.cached_tokens, before.usage.prompt_tokens + 7, during


def pressed(folder, pause_seconds: float) -> LocalStack:
    """One worker with a cache of few tokens."""
    router = resolve(RouterConfig(model=str(folder), served_model_name="m", pause_seconds=pause_seconds))
    worker = WorkerConfig(
        model=str(folder), fake="0,0", served_model_name="m", max_total_tokens=600, max_pinned_share=0.5
    )
    return LocalStack(StackConfig(router, worker, FrontendConfig()))


@pytest.mark.parametrize("transport", ["zmq", "http"])
@pytest.mark.parametrize("keeps", [True, False])
def test_a_tool_pauses_the_session_and_its_prefix_stays(folder, keeps, transport):
    """Under a flood that needs the whole cache several times over."""
    with pressed(folder, 60.0 if keeps else 0.0) as running, Client(running.address) as other:

        async def flood(_: float) -> int:
            await asyncio.sleep(0.06)
            for number in range(12):
                await other.aio.generate([5 + number] * 200, SHORT)
            return (await other.aio.health())["paused"]

        with reached(transport, folder, running.address) as address, Client(address) as client:
            # The flood is on another client's loop.
            cached, known, paused = patient.run(client, lambda s: other.run(flood(s)), 0.0)
        assert paused == 1 and cached == (known if keeps else 0)
        pauses = other.report()["pauses"]
        assert (pauses["now"], pauses["ended"], pauses["tokens"]) == (0, 1, known + 1)
        assert pauses["kept_tokens"] == cached and 0 < pauses["seconds"] < 30
        other.generate([5, 6], SHORT)
        worker = other.health()["workers"][0]
        assert worker["free_pages"] + worker["evictable_pages"] == worker["total_pages"], "nothing is pinned any more"
        assert 'radixrt_pauses_total{tenant="default"} 1.0' in other.metrics()


def test_who_is_told_of_tools(running, monkeypatch):
    """Of those that take long and have nothing else to do, once; and none waits when its program has ended."""
    _, client = running
    sent = []
    monkeypatch.setattr("radixrt.wire.encode", _tapped(sent))

    @program
    async def busy(s: Branch) -> int:
        await s.tool(time.sleep, 0.05)  # there is nothing to keep
        s += "start"
        s += gen("x", SHORT)
        await s.wait()
        await s.tool(str, 1)
        assert not any(isinstance(message, Pause) for message, _ in sent)
        await asyncio.gather(s.tool(time.sleep, 0.05), s.tool(asyncio.sleep, 0.06))
        s += gen("y", SHORT)
        await s.wait()
        one, two = s.fork(2)
        await asyncio.gather(one.tool(asyncio.sleep, 0.04), two.tool(asyncio.sleep, 0.04))
        return (await client.aio.health())["paused"]

    assert busy.run(client) == 2
    pauses = [message for message, _ in sent if isinstance(message, Pause)]
    assert len(pauses) == 3 and pauses[1].state == pauses[2].state
    client.run(asyncio.sleep(0.02))
    assert client.health()["paused"] == 0


def test_a_branch_that_asks_does_not_pause(slow, monkeypatch):
    sent = []
    monkeypatch.setattr("radixrt.wire.encode", _tapped(sent))

    @program
    async def asks(s: Branch) -> None:
        s += "start"
        s += gen("x", SHORT, max_tokens=2)
        await s.wait()
        s += gen("y", SHORT, max_tokens=30)
        await s.tool(asyncio.sleep, 0.05)
        await s.wait()

    asks.run(slow)
    assert not any(isinstance(message, Pause) for message, _ in sent)
