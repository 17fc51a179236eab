"""The handlers of /v1/messages."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from radixrt.formats.tools import ToolUse
from radixrt.frontend.anthropic.caching import breakpoints, pinned
from radixrt.frontend.anthropic.exchange import MessageExchange
from radixrt.frontend.anthropic.replies import MessageReply
from radixrt.frontend.anthropic.schema import Counted, Messages
from radixrt.frontend.generate.answers import StreamAnswer, WholeAnswer
from radixrt.frontend.generate.generation import Generation
from radixrt.frontend.generate.prepare import Prompts
from radixrt.frontend.http.auth import json_response
from radixrt.frontend.http.body import MIN_BYTES, apart, is_large
from radixrt.frontend.http.codec import parse
from radixrt.tokens import Tokenizer

_messages = msgspec.json.Decoder(Messages)
_counted = msgspec.json.Decoder(Counted)


class MessageRoutes:
    """`generation`, `prompts` and `read` are the front end's. Without a tokenizer there are no pins."""

    def __init__(
        self,
        generation: Generation,
        prompts: Prompts,
        tokenizer: Tokenizer | None,
        read: Callable[[Request], Awaitable[bytes]],
    ) -> None:
        self._generation = generation
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._read = read

    async def create(self, request: Request, key: str) -> StreamAnswer | WholeAnswer:
        body = parse(_messages, await self._read(request))
        exchange_of = functools.partial(MessageExchange, max_tokens=body.max_tokens)
        pins = functools.partial(self._pins, key)
        return await self._generation.answer(request, key, body, MessageReply, exchange_of, pins)

    async def count(self, request: Request, key: str) -> Response:
        body = parse(_counted, await self._read(request))
        prompt = await apart(is_large(request), lambda: body.prompt(body.tool_use()))
        await apart(is_large(request), lambda: breakpoints(body))
        await self._generation.check_model(body.model, key)
        return json_response({"input_tokens": await self._prompts.num_tokens(prompt, key, body)})

    async def _pins(self, key: str, body: Messages, use: ToolUse, ids: bytes) -> list[tuple[int, float]]:
        """The pins of a request's breakpoints. Found in a thread, since each renders the chat once more."""
        if self._tokenizer is None or not await apart(len(ids) > MIN_BYTES, lambda: breakpoints(body)):
            return []
        namespace = self._prompts.namespace(key, body.cache_salt)
        return await self._prompts.aside(key, pinned, self._tokenizer, body, use, ids, namespace)
