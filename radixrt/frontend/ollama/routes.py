"""The handlers of /api/..."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from radixrt.client import AsyncClient
from radixrt.formats.output import Formats
from radixrt.frontend.generate.answers import StreamAnswer, WholeAnswer
from radixrt.frontend.generate.generation import Generation
from radixrt.frontend.http.auth import Handler, KeyedHandler, json_response
from radixrt.frontend.http.codec import parse
from radixrt.frontend.http.errors import ApiError, refuse
from radixrt.frontend.ollama.about import VERSION, show_json, tag_json
from radixrt.frontend.ollama.exchange import OllamaExchange
from radixrt.frontend.ollama.replies import ChatReply, GenerateReply, OllamaReply, head
from radixrt.frontend.ollama.schema import Body, Chat, Generate, Show
from radixrt.version import __version__

UNSERVED = {
    "models are not managed here; the server is started with one": ("pull", "push", "create", "copy", "delete"),
    "embeddings are not served": ("embed", "embeddings"),
}
"""Why routes are not served."""
_chat = msgspec.json.Decoder(Chat)
_generate = msgspec.json.Decoder(Generate)
_show = msgspec.json.Decoder(Show)


class OllamaRoutes:
    """`ask` returns a client with an API key; `formats` are those of the served model; `read` is the front end's."""

    def __init__(
        self,
        generation: Generation,
        ask: Callable[[str], AsyncClient],
        formats: Formats,
        read: Callable[[Request], Awaitable[bytes]],
    ) -> None:
        self._generation = generation
        self._ask = ask
        self._formats = formats
        self._read = read

    def posts(self, guarded: Callable[[KeyedHandler], Handler]) -> dict[str, Handler]:
        """The routes of answers."""
        return {"/api/chat": guarded(self.chat), "/api/generate": guarded(self.generate)}

    def routes(self, guarded: Callable[[KeyedHandler], Handler]) -> list[Route]:
        """The other routes, those that need a key through `guarded`."""
        found = [
            Route("/api/version", self.version),
            Route("/api/tags", guarded(self.tags)),
            Route("/api/show", guarded(self.show), methods=["POST"]),
        ]
        for why, names in UNSERVED.items():
            handler = guarded(functools.partial(_refuse, why))
            found += [Route(f"/api/{name}", handler, methods=["POST", "DELETE"]) for name in names]
        return found

    async def chat(self, request: Request, key: str) -> StreamAnswer | WholeAnswer | Response:
        return await self._answer(request, key, _chat, ChatReply)

    async def generate(self, request: Request, key: str) -> StreamAnswer | WholeAnswer | Response:
        return await self._answer(request, key, _generate, GenerateReply)

    async def _answer(
        self, request: Request, key: str, decoder: msgspec.json.Decoder[Any], reply: type[OllamaReply]
    ) -> StreamAnswer | WholeAnswer | Response:
        started = time.perf_counter_ns()
        body: Body = parse(decoder, await self._read(request))
        if body.loads:
            return await self._loaded(body, key, reply)
        reply_of = functools.partial(reply, started=started)
        exchange_of = functools.partial(OllamaExchange, num_calls=body.num_calls)
        return await self._generation.answer(request, key, body, reply_of, exchange_of)

    async def _loaded(self, body: Body, key: str, reply: type[OllamaReply]) -> Response:
        """The reply to a request that loads the model, which always is, or that unloads it, which it never is."""
        await self._generation.check_model(body.model, key)
        reason = "unload" if body.keep_alive in (0, "0") else "load"
        return json_response(head(body.model or "") | reply.told() | {"done_reason": reason, "done": True})

    async def tags(self, request: Request, key: str) -> Response:
        """The models that are served, with their LoRA adapters."""
        models = await self._ask(key).models()
        return json_response({"models": [tag_json(model["id"], model.get("parent")) for model in models]})

    async def show(self, request: Request, key: str) -> Response:
        """A model: how long a prompt may be, and whether it calls tools and thinks."""
        body = parse(_show, await self._read(request))
        wanted = body.model or body.name
        if not wanted:
            refuse("model", "is missing")
        name = await self._ask(key).check_model(wanted)
        for model in await self._ask(key).models():
            if model["id"] == name:
                return json_response(show_json(wanted, model.get("parent"), model["max_model_len"], self._formats))
        raise ApiError(404, f"model {wanted!r} is not served here", "model", "model_not_found")

    async def version(self, request: Request) -> Response:
        return json_response({"version": VERSION, "radixrt": __version__})


async def _refuse(why: str, request: Request, key: str) -> Response:
    raise ApiError(501, f"{request.url.path}: {why}")
