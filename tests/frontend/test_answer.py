"""How an answer learns that its client has left."""

from __future__ import annotations

import asyncio

from radixrt.frontend.answer import Disconnected, Mailbox, watch
from radixrt.frontend.protocol import LEAVING


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
