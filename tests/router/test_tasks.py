"""Work for clients in tasks: what it answers, how it ends, and what becomes of the pause that it ends."""

from __future__ import annotations

import asyncio
from unittest.mock import patch

import pytest

from radixrt.config import RouterConfig
from radixrt.messages import Done, Error, TextPrompt, Tokenize, Unpin
from radixrt.requests.validate import Refused
from radixrt.router.core.core import RouterCore
from radixrt.router.core.effects import Order, Reply
from radixrt.router.programs.state_store import Key
from radixrt.router.server.tasks import Tasks

STATE = Key("default", "s" * 16, 1)
ASK = Tokenize(id=4, prompt=TextPrompt("x"))


class Setup:
    """Tasks of a core with one pause. Work waits until `go` is set."""

    def __init__(self, limit: int = 2, **config) -> None:
        self.core = RouterCore(RouterConfig(max_queued_requests=limit, **config))
        self.core.pauses.begin(STATE, "n", b"", 60.0, "w0", 0.0)
        self.sent: list = []
        self.tasks = Tasks(self.core, self.sent.extend)
        self.go = asyncio.Event()
        self.problem: Exception | None = None

    async def work(self, client: bytes, message: Tokenize) -> None:
        await self.go.wait()
        if self.problem:
            raise self.problem
        self.sent.append(Reply(client, Done(message.id)))

    async def end(self) -> list:
        """What was sent when all work has ended."""
        self.go.set()
        await asyncio.sleep(0.01)
        assert not self.tasks
        return self.sent

    @property
    def paused(self) -> bool:
        return len(self.core.pauses) == 1


def unpinned(effects: list) -> list:
    """All but the orders that end a pause."""
    return [e for e in effects if not (isinstance(e, Order) and isinstance(e.message, Unpin))]


def in_loop(test):
    def run() -> None:
        asyncio.run(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@in_loop
async def test_work_answers_and_its_id_is_free_again():
    setup = Setup()
    setup.tasks.start(setup.work, b"c", ASK, "default")
    with pytest.raises(Refused, match="request id 4 is in flight already"):
        setup.tasks.check_id(b"c", 4)
    with pytest.raises(Refused, match="request id 4 is in flight already"):
        setup.tasks.start(setup.work, b"c", ASK, "default")
    setup.tasks.check_id(b"d", 4)
    assert await setup.end() == [Reply(b"c", Done(4))]
    setup.tasks.check_id(b"c", 4)
    assert setup.paused


@in_loop
async def test_no_more_than_the_limit_with_what_the_core_has():
    setup = Setup(limit=2)
    with patch.object(RouterCore, "runs_in_flight", 1):
        setup.tasks.start(setup.work, b"c", ASK, "default")
        with pytest.raises(Refused, match="too many") as refused:
            setup.tasks.start(setup.work, b"d", ASK, "default", paused=STATE)
        setup.tasks.start(setup.work, b"e", ASK, "default", always=True)
        with pytest.raises(Refused, match="in flight already"):
            setup.tasks.start(setup.work, b"e", ASK, "default", always=True)
    assert refused.value.code == 429 and not setup.paused and setup.sent
    setup.tasks.cancel(b"e", 4)
    setup.tasks.start(setup.work, b"d", ASK, "default")
    assert unpinned(await setup.end()) == [Reply(b"c", Done(4)), Reply(b"d", Done(4))]


@in_loop
async def test_what_fails_is_answered_with_an_error_and_ends_its_pause():
    setup = Setup()
    setup.problem = Refused("prompt", "prompt is wrong", 410)
    setup.tasks.start(setup.work, b"c", ASK, "default", paused=STATE)
    assert setup.paused
    assert unpinned(await setup.end()) == [Reply(b"c", Error(4, 410, "prompt is wrong", "prompt"))]
    assert not setup.paused


@in_loop
async def test_a_fault_of_the_router_is_not_the_clients():
    setup = Setup()
    setup.problem = KeyError("x")
    setup.tasks.start(setup.work, b"c", ASK, "default")
    ((_, error),) = await setup.end()
    assert error.code == 500 and "its log says why" in error.message


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("end", ["cancel", "cancel_client"])
def test_what_is_cancelled_says_nothing_and_ends_its_pause(begun, end):
    async def main() -> None:
        setup = Setup()
        setup.tasks.start(setup.work, b"c", ASK, "default", paused=STATE)
        setup.tasks.start(setup.work, b"d", ASK, "default")
        if begun:
            await asyncio.sleep(0)
        setup.tasks.cancel(b"c", 5)
        setup.tasks.cancel(b"c", 4) if end == "cancel" else setup.tasks.cancel_client(b"c")
        setup.tasks.check_id(b"c", 4)
        assert unpinned(await setup.end()) == [Reply(b"d", Done(4))] and not setup.paused

    asyncio.run(main())


@in_loop
async def test_work_may_hand_on_its_message_and_its_pause():
    setup, handed = Setup(), []

    async def work(client: bytes, message: Tokenize) -> None:
        setup.tasks.leave(client, message.id)
        setup.tasks.check_id(client, message.id)
        handed.append(setup.tasks.hand_on_pause())
        handed.append(setup.tasks.hand_on_pause())

    assert not setup.tasks.hand_on_pause(), "outside of a task"
    setup.tasks.start(work, b"c", ASK, "default", STATE)
    assert await setup.end() == [] and handed == [True, False]
    assert setup.paused, "whoever took it over ends it"


@in_loop
async def test_at_the_end_all_is_cancelled_and_pauses_stay():
    setup = Setup()
    setup.tasks.start(setup.work, b"c", ASK, "default", paused=STATE)
    await asyncio.sleep(0)
    setup.tasks.close()
    assert await setup.end() == [] and setup.paused


@in_loop
async def test_a_tenant_that_fills_all_places_with_work_leaves_others_some():
    """As of requests: with 16 places, two are for tenants that have fewer than two in flight."""
    setup = Setup(limit=16, api_key=("a:ka", "b:kb"))

    def asks(key: str, id: int) -> bool:
        try:
            message = Tokenize(id=id, prompt=TextPrompt("x"), api_key=key)
            setup.tasks.start(setup.work, key.encode(), message, tenant=setup.core.tenant(key))
        except Refused as refused:
            assert refused.code == 429
            return False
        return True

    assert [asks("ka", id) for id in range(20)] == [True] * 14 + [False] * 6
    assert [asks("kb", id) for id in range(3)] == [True, True, False]
    setup.tasks.cancel_client(b"ka")
    assert asks("kb", 3)
    await setup.end()
    assert asks("ka", 0)
    await setup.end()


@pytest.mark.parametrize("how", ["ends", "leaves", "cancel", "cancel_client"])
def test_a_place_is_free_at_once_when_its_task_is_gone(how):
    """Two tenants, 16 places: the last two are for whoever has less than two."""

    async def main() -> None:
        setup = Setup(limit=16, api_key=("a:ka", "b:kb"))
        with patch.object(RouterCore, "runs_in_flight", 14):
            for _ in range(8):
                await take(setup)
        assert not setup.tasks

    async def take(setup: Setup) -> None:
        async def leave(client: bytes, message: Tokenize) -> None:
            setup.tasks.leave(client, message.id)
            setup.tasks.start(setup.work, b"c", ASK, "a")
            setup.tasks.cancel(b"c", 4)

        setup.tasks.start(leave if how == "leaves" else setup.work, b"c", ASK, "a")
        setup.tasks.start(setup.work, b"c", Tokenize(id=5, prompt=TextPrompt("x")), "a")
        with pytest.raises(Refused, match="too many"):
            setup.tasks.start(setup.work, b"c", Tokenize(id=6, prompt=TextPrompt("x")), "a")
        if how == "cancel":
            setup.tasks.cancel(b"c", 4)
            setup.tasks.start(setup.work, b"c", ASK, "a")
        elif how == "cancel_client":
            setup.tasks.cancel_client(b"c")
            setup.tasks.start(setup.work, b"c", ASK, "a")
        await setup.end()

    asyncio.run(main())
