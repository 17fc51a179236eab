"""The handlers of /v1/responses."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from radixrt.frontend.generate.answers import StreamAnswer, WholeAnswer
from radixrt.frontend.generate.generation import Generation
from radixrt.frontend.generate.prepare import Prompts
from radixrt.frontend.generate.shared_store import SharedStore
from radixrt.frontend.http.body import apart, is_large
from radixrt.frontend.http.codec import encode, parse
from radixrt.frontend.http.errors import ApiError
from radixrt.frontend.responses.exchange import ResponseExchange
from radixrt.frontend.responses.items import page
from radixrt.frontend.responses.references import is_reference, resolved
from radixrt.frontend.responses.replies import ResponseReply
from radixrt.frontend.responses.schema import Create
from radixrt.frontend.responses.sealed import Seals
from radixrt.frontend.responses.shared import SharedResponses
from radixrt.frontend.responses.store import LocalResponses
from radixrt.frontend.responses.tools import listed
from radixrt.messages import Namespace, Prompt

RESPONSES_PATH = "/v1/responses"
MAX_INLINE_CHAIN_MESSAGES = 1024
"""Chains of more messages are read in a thread."""
_create = msgspec.json.Decoder(Create)


class Asked(msgspec.Struct, kw_only=True):
    """What a response says of the request that it answers, as far as prompts depend on it."""

    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None

    def create(self) -> Create:
        """A request of the same, which adds nothing."""
        reasoning = {"effort": self.reasoning["effort"]} if self.reasoning and self.reasoning.get("effort") else None
        return Create(
            input=[],
            instructions=self.instructions,
            tools=self.tools,
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning=reasoning,
        )


_asked = msgspec.json.Decoder(Asked)


class Responses:
    """`generation`, `prompts` and `read` are the front end's; `tenant` returns the tenant of a key; `seals` sign
    reasoning that clients keep."""

    def __init__(
        self,
        max_bytes: int,
        shared_store: SharedStore | None,
        generation: Generation,
        prompts: Prompts,
        read: Callable[[Request], Awaitable[bytes]],
        tenant: Callable[[str], str],
        seals: Seals,
    ) -> None:
        self._store = SharedResponses(shared_store) if shared_store and max_bytes else LocalResponses(max_bytes)
        self._generation = generation
        self._prompts = prompts
        self._read = read
        self._tenant = tenant
        self._seals = seals

    def forget(self, is_meant: Callable[[str], bool]) -> None:
        """Drop the responses of the tenants that are meant from this process."""
        if isinstance(self._store, LocalResponses):
            self._store.forget(is_meant)

    async def create(self, request: Request, key: str) -> StreamAnswer | WholeAnswer:
        asked, turns = await self._read_asked(request, key)
        namespace = self._namespace(key, asked.cache_salt or "")

        def keep(response_id: str, data: bytes, message: dict[str, Any]) -> None:
            if asked.stores:
                self._store.put(namespace, response_id, data, turns, [*asked.added, message], key)

        seal = functools.partial(self._seals.seal, namespace, key) if asked.seals_reasoning else None
        reply_of = functools.partial(ResponseReply, asked=asked, seal=seal)
        exchange_of = functools.partial(ResponseExchange, keep=keep)
        return await self._generation.answer(request, key, asked, reply_of, exchange_of)

    async def count(self, request: Request, key: str) -> Response:
        """Count the tokens of a request's prompt."""
        asked, _ = await self._read_asked(request, key)
        (prompt,) = await apart(is_large(request), lambda: asked.prompts(asked.tool_use()))
        await self._generation.check_model(asked.model, key)
        tokens = await self._prompts.num_tokens(prompt, key, asked)
        counted = {"object": "response.input_tokens", "input_tokens": tokens}
        return Response(encode(counted), media_type="application/json")

    async def _read_asked(self, request: Request, key: str) -> tuple[Create, tuple[Any, ...]]:
        """Returns (the request, the turns that it continues)."""
        body = parse(_create, await self._read(request))
        namespace = self._namespace(key, body.cache_salt or "")
        turns, before = await self._before(namespace, body.previous_response_id, key)
        if isinstance(body.input, list) and any(map(is_reference, body.input)):
            body.input = await resolved(body.input, lambda response: self._store.body(namespace, response, key))

        def follow() -> None:
            if isinstance(body.input, list):
                body.input = self._seals.restored(namespace, key, body.input)
            body.follow(before)

        await apart(is_large(request) or len(before) > MAX_INLINE_CHAIN_MESSAGES, follow)
        return body, turns

    async def get(self, request: Request, key: str) -> Response:
        if request.query_params.get("stream") == "true":
            raise ApiError(400, "stream: a response that is complete is not streamed again", "stream")
        namespace, response_id = self._asked_for(request, key)
        body = await self._store.body(namespace, response_id, key)
        if body is None:
            raise _unknown(response_id)
        return Response(body, media_type="application/json")

    async def input_items(self, request: Request, key: str) -> Response:
        """The input items of a response, of its whole chain."""
        namespace, response_id = self._asked_for(request, key)
        found = await self._store.before(namespace, response_id, key)
        if found is None:
            raise _unknown(response_id)
        *messages, _ = found[1]
        body = await self._store.body(namespace, response_id, key)
        tools = listed(msgspec.json.decode(body)["tools"]) if body else []
        items = await apart(
            len(messages) > MAX_INLINE_CHAIN_MESSAGES, lambda: page(response_id, messages, request.query_params, tools)
        )
        return Response(encode(items), media_type="application/json")

    async def delete(self, request: Request, key: str) -> Response:
        namespace, response_id = self._asked_for(request, key)
        if not await self._store.delete(namespace, response_id, key):
            raise _unknown(response_id)
        gone = {"id": response_id, "object": "response", "deleted": True}
        return Response(encode(gone), media_type="application/json")

    async def prompt_of(self, response_id: str, cache_salt: str, key: str) -> Prompt | None:
        """The chat that ends with a response, and with which a request that continues it begins, if its instructions
        and tools are the same; None if it is not kept."""
        namespace = self._namespace(key, cache_salt)
        found = await self._store.before(namespace, response_id, key)
        body = await self._store.body(namespace, response_id, key)
        if found is None or body is None:
            return None
        asked = parse(_asked, body).create()
        asked.follow(found[1])
        (prompt,) = asked.prompts(asked.tool_use())
        return prompt

    async def _before(
        self, namespace: Namespace, response_id: str | None, key: str
    ) -> tuple[tuple[Any, ...], list[dict[str, Any]]]:
        """Returns the turns, and the messages, that a request continues. A response of another tenant counts as
        unknown."""
        if response_id is None:
            return (), []
        field = "previous_response_id"
        found = await self._store.before(namespace, response_id, key)
        if found is None:
            message = f"{field}: there is no response {response_id!r} here, or it is no longer kept"
            raise ApiError(400, message, field, "previous_response_not_found")
        return found

    def _asked_for(self, request: Request, key: str) -> tuple[Namespace, str]:
        """Returns (namespace, id) of a response; the salt must be that of the request that created it."""
        return self._namespace(key, request.query_params.get("cache_salt", "")), request.path_params["id"]

    def _namespace(self, key: str, cache_salt: str) -> Namespace:
        return Namespace(self._tenant(key), salt=cache_salt)


def _unknown(response_id: str) -> ApiError:
    return ApiError(404, f"there is no response {response_id!r} here, or it is no longer kept", "id")
