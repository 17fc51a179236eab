"""/tokenize and /detokenize: their bodies and handlers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from radixrt.client import token_bytes, token_list
from radixrt.formats.tools import tool_use
from radixrt.frontend.generate.link import RouterLink
from radixrt.frontend.generate.request import Int
from radixrt.frontend.http.auth import json_response
from radixrt.frontend.http.body import apart, is_large
from radixrt.frontend.http.codec import parse
from radixrt.frontend.http.errors import api_error, refuse
from radixrt.frontend.openai.schema import chat_prompt
from radixrt.messages import TOKEN_BYTES, Name, Namespace, Prompt, TextPrompt
from radixrt.tokens import TextService, Tokenizer
from radixrt.tokens.errors import FieldError, Room
from radixrt.tokens.text import STEP_IDS
from radixrt.tokens.turns import Steps

MAX_LISTED_TOKENS = 1 << 20
"""The most tokens that are listed: as many as the numbers of a body, so that they can be decoded again."""


class Listed(Room):
    """Room for MAX_LISTED_TOKENS tokens."""

    def check(self, tokens: int, *, whole: bool = True) -> None:
        if tokens > self.limit:
            raise FieldError("prompt", f"prompt: it has more than {self.limit} tokens, which are not listed")


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize: `prompt`, or `messages` of a chat."""

    model: Name | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    template_args: dict[str, Any] | None = msgspec.field(default=None, name="chat_template_kwargs")

    def to_prompt(self) -> Prompt:
        if (self.prompt is None) == (self.messages is None):
            refuse("prompt", "either prompt or messages is needed")
        if self.messages is not None:
            return chat_prompt(self, self.messages, tool_use(self.tools, None, None).shown)
        return TextPrompt(self.prompt or "", self.add_special_tokens is not False)


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: Name | None = None
    tokens: list[Int]


_tokenize = msgspec.json.Decoder(TokenizeBody)
_detokenize = msgspec.json.Decoder(DetokenizeBody)


def _token_texts(tokenizer: Tokenizer, ids: list[int]) -> Steps[list[str]]:
    texts: list[str] = []
    for at in range(0, len(ids), STEP_IDS):
        texts += map(tokenizer.token_text, ids[at : at + STEP_IDS])
        yield None
    return texts


class Tokenization:
    """`read` reads a request's body; `namespace` returns that of a key and salt. If `max_model_len` is 0, the router's
    is used."""

    def __init__(
        self,
        text: TextService,
        link: RouterLink,
        max_model_len: int,
        read: Callable[[Request], Awaitable[bytes]],
        namespace: Callable[[str, str | None], Namespace],
    ) -> None:
        self._text = text
        self._link = link
        self._own_max_model_len = max_model_len
        self._read = read
        self._namespace = namespace

    async def tokenize(self, request: Request, key: str) -> Response:
        body = parse(_tokenize, await self._read(request))
        prompt = await apart(is_large(request), body.to_prompt)
        await self._link.check_model(body.model, key)
        try:
            room = Listed(MAX_LISTED_TOKENS)
            encoded = await self._text.encode(prompt, self._namespace(key, None), room)
            room.check(len(encoded) // TOKEN_BYTES)
            ids = token_list(encoded)
        except FieldError as problem:
            raise api_error(problem, {"template_args": "chat_template_kwargs"}) from None
        answer = {"count": len(ids), "max_model_len": await self._max_model_len(key), "tokens": ids}
        tokenizer = self._text.tokenizer
        texts = None
        if body.return_token_strs and tokenizer:
            texts = await self._text.run(self._namespace(key, None), _token_texts(tokenizer, ids))
        return await apart(len(ids) > STEP_IDS, lambda: json_response(answer | {"token_strs": texts}))

    async def detokenize(self, request: Request, key: str) -> Response:
        body = parse(_detokenize, await self._read(request))
        await self._link.check_model(body.model, key)
        ids, namespace = token_bytes(body.tokens), self._namespace(key, None)
        return json_response({"prompt": await self._text.decode(ids, skip_special_tokens=False, namespace=namespace)})

    async def _max_model_len(self, key: str) -> int:
        return self._own_max_model_len or (await self._link.ask(key).health())["max_model_len"]
