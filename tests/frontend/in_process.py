"""A front end's application without sockets and processes: its router encodes prompts, and answers nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

from radixrt.config import FrontendConfig, resolve
from radixrt.frontend.app import Frontend
from radixrt.messages import ClientReply, ClientRequest, Delta, Deltas, Error, Generate, Usage
from radixrt.tokens import TextService
from radixrt.tokens.errors import FieldError


class Router:
    """Keeps the ids of the last prompt. Every answer is empty."""

    def __init__(self, text: TextService) -> None:
        self.ids = b""
        self._text = text
        self._deliver: Callable[[ClientReply], None]

    def attach(self, deliver: Callable[[ClientReply], None]) -> bytes:
        self._deliver = deliver
        return b"front end"

    def take(self, client: bytes, message: ClientRequest) -> None:
        asyncio.get_running_loop().call_soon(lambda: self._deliver(self._reply(message)))

    def _reply(self, message: ClientRequest) -> ClientReply:
        assert isinstance(message, Generate)
        try:
            self.ids = self._text.encode_now(message.prompt)
        except FieldError as problem:
            return Error(message.id, 400, str(problem), problem.field)
        return Deltas([Delta(message.id, finish="length", usage=Usage(len(self.ids) // 4, 0, 0))])


class Reply(NamedTuple):
    status: int
    body: bytes
    ids: bytes
    """Of the prompt that has reached the router; none if the request was refused."""


class InProcess:
    """A front end of a model's `folder`, which has a tokenizer and a chat template."""

    def __init__(self, folder: Path) -> None:
        config = resolve(FrontendConfig(model=str(folder), served_model_name="m"))
        self.text = TextService.load(config)
        self._router = Router(self.text)
        self._app = Frontend(config, self.text, self._router).app

    async def post(self, path: str, body: dict[str, Any]) -> Reply:
        content, sent = [json.dumps(body).encode()], []
        headers = [(b"host", b"localhost"), (b"content-length", str(len(content[0])).encode())]
        scope = {"type": "http", "http_version": "1.1", "scheme": "http", "method": "POST", "path": path}
        scope |= {"headers": headers, "query_string": b""}

        async def receive() -> dict[str, Any]:
            if not content:  # the client waits, and does not leave
                await asyncio.Event().wait()
            return {"type": "http.request", "body": content.pop(), "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        self._router.ids = b""
        await self._app(scope, receive, send)
        return Reply(sent[0]["status"], b"".join(part.get("body", b"") for part in sent[1:]), self._router.ids)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[InProcess]:
        """As a server runs the application, from its start to its end."""
        asked: asyncio.Queue[str] = asyncio.Queue()
        told: asyncio.Queue[str] = asyncio.Queue()

        async def receive() -> dict[str, str]:
            return {"type": f"lifespan.{await asked.get()}"}

        async def send(message: dict[str, str]) -> None:
            await told.put(message["type"])

        life = asyncio.create_task(self._app({"type": "lifespan", "state": {}}, receive, send))
        try:
            await asked.put("startup")
            assert await told.get() == "lifespan.startup.complete"
            yield self
        finally:
            await asked.put("shutdown")
            await life
            self.text.close()
