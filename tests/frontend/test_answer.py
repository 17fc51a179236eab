"""How an answer learns that its client has left, or does not read."""

from __future__ import annotations

import asyncio

import pytest

from radixrt.frontend.answer import MAX_BACKLOG, Disconnected, Mailbox, NativeExchange, StreamAnswer, watch
from radixrt.frontend.protocol import LEAVING
from radixrt.messages import TextPrompt, Tokenize, Tokens


def test_a_server_of_another_kind_is_listened_to():
    async def main() -> None:
        events: asyncio.Queue[str] = asyncio.Queue()

        async def receive() -> dict[str, str]:
            return {"type": await events.get()}

        left, stayed = Mailbox(), Mailbox()
        watch({"type": "http"}, receive, left)
        events.put_nowait("http.request")
        events.put_nowait("http.disconnect")
        while not events.empty():
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert isinstance(left.failure, Disconnected)
        watch({"type": "http", "extensions": {}}, receive, stayed)()
        events.put_nowait("http.disconnect")
        for _ in range(3):
            await asyncio.sleep(0)
        assert stayed.failure is None and not events.empty()

    asyncio.run(main())


def test_ours_says_so():
    told = []
    exchange = Mailbox()
    watch({"extensions": {LEAVING: told.append}}, None, exchange)()
    assert exchange.failure is None
    told[0]()
    assert isinstance(exchange.failure, Disconnected)


LARGE = b"x" * (MAX_BACKLOG + 1)


def test_what_nobody_could_read_yet_is_no_backlog():
    """Be it one large chunk, many in a turn, or one that comes while another is sent."""

    async def main() -> None:
        mailbox = Mailbox()
        for _ in range(2):
            mailbox.put(LARGE)
        assert len(await mailbox.part()) == 2 * len(LARGE)
        mailbox.put(LARGE)
        assert await mailbox.part() == LARGE and mailbox.failure is None

    asyncio.run(main())


@pytest.mark.parametrize("ended", [False, True])
def test_a_client_that_does_not_read_gets_nothing_with_a_gap(ended):
    """Nor is its answer complete, also where the end is what was too much."""

    async def main() -> None:
        mailbox = Mailbox()
        mailbox.put(b"first")
        assert await mailbox.part() == b"first"
        for chunk in (b"second", LARGE):
            assert mailbox.failure is None
            mailbox.put(chunk)
        mailbox.put(b"behind the gap")
        mailbox.finished = ended
        with pytest.raises(Disconnected):
            await mailbox.part()

    asyncio.run(main())


def test_a_large_answer_to_a_native_message():
    class Router:
        def submit(self, request: Tokenize, take) -> int:
            asyncio.get_running_loop().call_soon(take, Tokens(1, bytes(MAX_BACKLOG)))
            return 1

        def cancel(self, request_id: int) -> None:
            pass

    async def main() -> None:
        sent = []

        async def send(message: dict) -> None:
            sent.append((message["type"], len(message.get("body", b""))))

        exchange = NativeExchange(Router(), Tokenize(id=0, prompt=TextPrompt("x")))
        await StreamAnswer(exchange, b"application/x-ndjson")({"type": "http"}, asyncio.Event().wait, send)
        (start, _), (_, size), (_, rest) = sent
        assert start == "http.response.start" and size > MAX_BACKLOG and rest == 0

    asyncio.run(main())
