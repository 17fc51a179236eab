"""Programs whose states the server forgets, or whose router is another one all at once: they go on."""

from __future__ import annotations

import time

import httpx
import pytest

from radixrt import Branch, Sampling, assistant, gen, program, select, user
from radixrt.client import Client, ServerError
from radixrt.client.local import LocalStack
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.lang.speaker import Speaker
from radixrt.messages import Error, Fork, Pause, StatePrompt, TextSegment
from radixrt.process.ports import free_tcp_address
from tests.lang.conftest import reached, stack

SHORT = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True)
SCOPE = "0123456789abcdef"


def at(address: str, folder) -> LocalStack:
    worker = WorkerConfig(model=str(folder), fake="0,0", served_model_name="m")
    router = resolve(RouterConfig(model=str(folder), served_model_name="m"))
    return LocalStack(StackConfig(router, worker, FrontendConfig()), client_address=address)


@program
async def story(s: Branch, between) -> list[tuple[str, int]]:
    """A chat with tools, a choice and a fork; each value with the tokens of its prompt. `between` is called often."""
    found = []

    async def note(branch: Branch, name: str) -> None:
        value = await branch.value(name)
        found.append((value.text, value.usage.prompt_tokens))

    s += user("The quick brown fox")
    s += assistant("So: ", gen("a", SHORT))
    await note(s, "a")
    await s.tool(between, append="tool")
    s += assistant(gen("b", SHORT))
    await note(s, "b")
    await s.tool(between)
    s += user("Well?")
    s += assistant(select("c", [" yes", " no"]))
    await note(s, "c")
    children = s.fork(2)
    await s.tool(between)
    for child in children:
        child += user("Go on.")
        child += assistant(gen("d", SHORT))
        await note(child, "d")
        await child.tool(between)
        child += user("And?")
        child += assistant(gen("e", SHORT))
        await note(child, "e")
    return found


@pytest.fixture
def asked(monkeypatch) -> list[StatePrompt]:
    """What programs ask, in order."""
    asked, ask = [], Speaker._request

    def recording(speaker, work):
        async def told(prompt):
            asked.append(prompt)
            return await work(prompt)

        return ask(speaker, told)

    monkeypatch.setattr(Speaker, "_request", recording)
    return asked


@pytest.mark.parametrize("transport", ["zmq", "http"])
def test_a_server_that_keeps_no_state(folder, asked, transport):
    """Everything is sent again, once for each request, and the answers are the same."""
    with stack(folder) as plain, Client(plain.address) as client:
        expected = story.run(client, lambda: "ok")
    assert all(prompt.state or len(prompt.transcript) == 3 for prompt in asked) and len(asked) == 7
    asked.clear()
    with (
        stack(folder, state_bytes=1) as running,
        reached(transport, folder, running.address) as url,
        Client(url) as client,
    ):
        assert story.run(client, lambda: "ok") == expected
        assert client.health()["states"] == 0
    assert [bool(prompt.state) for prompt in asked] == [False] + [True, False] * 6


@pytest.mark.parametrize("transport", ["zmq", "http"])
def test_a_program_outlives_its_router(folder, asked, transport):
    """Which is another one after each tool: every branch sends what it has once more, and goes on. (Over HTTP when the
    front end has found the new one.)"""
    address = free_tcp_address()
    with at(address, folder) as plain, Client(plain.address) as client:
        expected = story.run(client, lambda: "ok")
    asked.clear()
    routers = [at(address, folder).__enter__()]

    def restart() -> str:
        routers.pop().__exit__()
        routers.append(at(address, folder).__enter__())
        while transport == "http" and httpx.get(url + "/health").status_code == 503:
            time.sleep(0.01)
        return "ok"

    try:
        with reached(transport, folder, address) as url, Client(url) as client:
            assert story.run(client, restart) == expected
            whole = [prompt for prompt in asked if not prompt.state]
            assert len(asked) == 7 + len(whole) - 1 and 4 <= len(whole) <= 7
    finally:
        routers.pop().__exit__()


def test_numbers_of_an_earlier_router_are_unknown(folder):
    """The error names the field; nobody gets what a later router keeps under the same number for another program."""
    address = free_tcp_address()
    names = set()
    for life in range(2):
        with at(address, folder) as running, Client(address) as client:
            scope = (SCOPE, SCOPE[::-1])[life]
            one = client.generate(_transcript(scope, f"life {life}", save=1), SHORT)
            assert (
                client.generate(_transcript(scope, " on", state=1), SHORT).usage.prompt_tokens > one.usage.prompt_tokens
            )
            if life:
                for prompt in (
                    _transcript(SCOPE, "x", state=1),
                    _transcript(SCOPE, "x", state=1, save=2, resumes=True),
                ):
                    with pytest.raises(ServerError, match="not known") as caught:
                        client.generate(prompt, SHORT)
                    assert (caught.value.code, caught.value.field) == (410, "prompt.state")
                errors = client.run(
                    _told(
                        client,
                        Pause(id=0, scope=SCOPE, state=1),
                        Fork(id=0, prompt=_transcript(SCOPE, state=1, save=2), count=2),
                    )
                )
                assert errors == [(410, "state"), (410, "prompt.state")]
            core = running._router_thread.server.core
            names |= {next(core.pauses._names), next(core.groups._ids)}
    assert len(names) == 4 and min(names) > 1 << 20 and max(names) < 1 << 53, "numbers that workers see are new, too"


def _transcript(scope: str, *texts: str, **fields) -> StatePrompt:
    return StatePrompt(scope, transcript=[TextSegment(text) for text in texts], **fields)


async def _told(client: Client, *messages: Fork | Pause) -> list[tuple[int, str]]:
    errors = []
    for message in messages:
        async with client.aio._answers(message) as answers:
            answer = await answers.get()
            assert isinstance(answer, Error), answer
            errors.append((answer.code, answer.field))
    return errors
