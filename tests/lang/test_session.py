"""What the server is told of a run, and in which order."""

from __future__ import annotations

import asyncio

import pytest

from radixrt.lang.session import Session
from radixrt.messages import Forget, StatePrompt


class Told:
    """A client whose messages are taken when the test says so."""

    def __init__(self) -> None:
        self.said: list[tuple[object, asyncio.Future[None]]] = []

    def tell(self, message: object) -> asyncio.Future[None]:
        taken = asyncio.get_running_loop().create_future()
        self.said.append((message, taken))
        return taken

    @property
    def forgets(self) -> int:
        return sum(isinstance(message, Forget) for message, _ in self.said)


@pytest.mark.parametrize("cancelled", [True, False])
@pytest.mark.parametrize("kind", ["fork", "pause"])
def test_it_is_told_to_forget_when_it_has_taken_what_is_to_be_forgotten(kind, cancelled):
    """Also where who waited for that was cancelled: messages over HTTP may overtake each other."""

    async def run() -> None:
        client = Told()
        session = Session(client)
        number = session.number()
        prompt = StatePrompt(session.scope, 0, [], save=number)
        waiting = session.fork(prompt, 2) if kind == "fork" else session.pause(number, None)
        if cancelled:
            waiting.cancel()
        session.end()
        await asyncio.sleep(0)
        assert client.forgets == 0
        ((_, taken),) = client.said
        taken.set_result(None)
        await asyncio.sleep(0.01)
        assert client.forgets == 1 and waiting.cancelled() == cancelled

    asyncio.run(run())


def test_it_is_told_to_forget_after_all_of_it():
    async def run() -> None:
        client = Told()
        session = Session(client)
        waiting = [session.pause(session.number(), None) for _ in range(2)]
        session.end()
        (_, first), (_, second) = client.said
        first.set_exception(RuntimeError("not taken"))
        await asyncio.sleep(0.01)
        assert client.forgets == 0
        second.set_result(None)
        await asyncio.sleep(0.01)
        assert client.forgets == 1
        assert isinstance(waiting[0].exception(), RuntimeError)

    asyncio.run(run())


def test_a_run_that_has_kept_nothing_is_not_to_be_forgotten():
    async def run() -> None:
        client = Told()
        Session(client).end()
        assert not client.said

    asyncio.run(run())
