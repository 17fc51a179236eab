"""How an answer learns that its client has left; large ones."""

from __future__ import annotations

import asyncio

from radixrt.frontend.generate.answers import StreamAnswer, watch
from radixrt.frontend.http.outbox import MAX_BACKLOG, Disconnected, Outbox
from radixrt.frontend.http.protocol import LEAVING
from radixrt.frontend.native.routes import NativeExchange
from radixrt.messages import TextPrompt, Tokenize, Tokens


def test_a_server_of_another_kind_is_listened_to():
    async def main() -> None:
        events: asyncio.Queue[str] = asyncio.Queue()

        async def receive() -> dict[str, str]:
            return {"type": await events.get()}

        left, stayed = Outbox(), Outbox()
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
    exchange = Outbox()
    watch({"extensions": {LEAVING: told.append}}, None, exchange)()
    assert exchange.failure is None
    told[0]()
    assert isinstance(exchange.failure, Disconnected)


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
