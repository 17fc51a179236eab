"""The HTTP application: routes, keys, the body limit, errors."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from radixrt.client import AsyncClient, ServerError, token_bytes, token_list
from radixrt.config import FrontendConfig
from radixrt.frontend import schema
from radixrt.frontend.about import About
from radixrt.frontend.answer import Exchange, NativeExchange, StreamAnswer, WholeAnswer
from radixrt.frontend.anthropic.caching import breakpoints, pinned
from radixrt.frontend.anthropic.errors import AnthropicError
from radixrt.frontend.anthropic.exchange import Identified, MessageExchange
from radixrt.frontend.anthropic.replies import MessageReply
from radixrt.frontend.anthropic.schema import Counted, Messages
from radixrt.frontend.choice import Choice
from radixrt.frontend.defaults import sampling_defaults
from radixrt.frontend.errors import ApiError
from radixrt.frontend.guard import (
    MESSAGES_PATH,
    Application,
    Handler,
    KeyedHandler,
    api_error,
    for_pages,
    header,
    json_response,
    key_of,
    origin_of,
)
from radixrt.frontend.output import TEXT, Formats, Output
from radixrt.frontend.peers import Peers
from radixrt.frontend.replies import ChatReply, Reply, native_line, session_json
from radixrt.frontend.responses.routes import RESPONSES_PATH, Responses
from radixrt.frontend.responses.schema import Asked
from radixrt.frontend.structured import Constraint
from radixrt.frontend.tools import ToolUse
from radixrt.messages import (
    Cancel,
    ChatPrompt,
    ClientRequest,
    Error,
    Generate,
    Origin,
    Prompt,
    Sampling,
    TextPrompt,
    TokenPrompt,
)
from radixrt.router.conversations import Conversations, facts
from radixrt.router.errors import FieldError, too_long
from radixrt.router.tokens import Encoded, TextService
from radixrt.router.validate import check_choices, check_sampling, parse_api_keys
from radixrt.transports import NATIVE_PATH, Here, HereTransport, ZmqTransport

ROUTER_SECONDS = 5.0
"""Time that the router has to answer a question about itself."""

_chat = msgspec.json.Decoder(schema.Chat)
_messages = msgspec.json.Decoder(Messages)
_counted = msgspec.json.Decoder(Counted)
_tokenize = msgspec.json.Decoder(schema.TokenizeBody)
_detokenize = msgspec.json.Decoder(schema.DetokenizeBody)
_native = msgspec.json.Decoder(ClientRequest)
POLL_SECONDS = 0.02
MOST_KEYLESS_BYTES = 8 << 10
"""Of a native message that is read before its key is known, which is in it."""


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes (--max-body-bytes)")


def _unknown_key(more: str = "") -> ApiError:
    return ApiError(401, f"unknown API key{more}", code="invalid_api_key")


def _keyless(limit: int) -> ApiError:
    return _unknown_key(f": a message of more than {limit} bytes needs it in a header")


def _response(error: ApiError) -> Response:
    return Response(error.body(), error.status, error.headers(), "application/json")


def _native_response(error: ApiError) -> Response:
    line = native_line(Error(None, error.status, error.message, error.param, error.retry_after))
    return Response(line, error.status, error.headers(), "application/x-ndjson")


@dataclass(frozen=True, slots=True)
class Ready:
    """A prompt of a request, and how it is to be answered."""

    prompt: Prompt
    encoded: Encoded
    sampling: Sampling
    """With its grammar, and within the room there is."""
    output: Output


class Frontend:
    """The handlers of one process. `app` is the ASGI application; its lifespan opens the connection to the router: to
    `here`, on the same event loop, or at `config.router`."""

    def __init__(self, config: FrontendConfig, text: TextService, here: Here | None = None) -> None:
        self._config = config
        self._here = here
        self._text = text
        self._peers = Peers(lambda: self._transport) if config.share_sessions else None
        self._conversations = Conversations(text, config, self._peers)
        self._formats = Formats(text.tokenizer, config.tool_call_parser, config.reasoning_parser)
        self._defaults = sampling_defaults(config.generation_config, text.generation)
        self._tenants = parse_api_keys(config.api_key)
        responses = Responses(
            config.response_bytes, self._peers, self._generate, self._num_tokens, self._body, self._tenant
        )
        posts = {
            "/v1/completions": self._guarded(self.completions),
            "/v1/chat/completions": self._guarded(self.chat),
            RESPONSES_PATH: self._guarded(responses.create),
            f"{RESPONSES_PATH}/input_tokens": self._guarded(responses.count),
            MESSAGES_PATH: self._guarded(self.messages, AnthropicError.wrap),
            f"{MESSAGES_PATH}/count_tokens": self._guarded(self.count, AnthropicError.wrap),
            NATIVE_PATH: self._native_guarded,
            "/tokenize": self._guarded(self.tokenize),
            "/detokenize": self._guarded(self.detokenize),
        }
        others = [
            Route(f"{RESPONSES_PATH}/{{id}}", self._guarded(responses.get), methods=["GET"]),
            Route(f"{RESPONSES_PATH}/{{id}}", self._guarded(responses.delete), methods=["DELETE"]),
            Route(f"{RESPONSES_PATH}/{{id}}/input_items", self._guarded(responses.input_items), methods=["GET"]),
            *About(self._ask).routes(self._guarded),
        ]
        self.app = for_pages(Application(posts, others, self._lifespan), config.allowed_origins)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        self._transport = HereTransport(self._here) if self._here else ZmqTransport(self._config.router)
        try:
            await self._wait_for_router()
            yield
        finally:
            await self.close()

    async def _wait_for_router(self) -> None:
        """So that the first request is not refused where both start together."""
        deadline = asyncio.get_running_loop().time() + ROUTER_SECONDS
        while not self._transport.connected and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(POLL_SECONDS)

    async def close(self) -> None:
        """Leave the router; requests in flight end with an error that says so."""
        await self._transport.close("the server is shutting down")

    # ------------------------------------------------------------ keys, limits, errors

    def _guarded(
        self,
        handler: KeyedHandler,
        told: Callable[[ApiError], ApiError] = lambda error: error,
    ) -> Handler:
        """The handler with the caller's key, which must be known where keys are configured; errors as OpenAI's, or as
        `told`. An error is given no name here that stays: it refers to this frame, and to those below with the body,
        and all would wait for the cyclic collector, which seldom comes (`radixrt.garbage`)."""

        async def guarded(request: Request) -> Any:
            try:
                key = key_of(request)
                self._check(key)
                return await handler(request, key)
            except (ApiError, FieldError, ServerError) as problem:
                return _response(told(api_error(problem)))

        return guarded

    async def _native_guarded(self, request: Request) -> Any:
        """The native route: errors are lines of its protocol, and a small message may carry its key itself."""
        try:
            return await self.native(request)
        except (ApiError, FieldError, ServerError) as problem:
            return _native_response(api_error(problem))

    def _check(self, key: str) -> None:
        if self._tenants and not any(hmac.compare_digest(key.encode(), known.encode()) for known in self._tenants):
            raise _unknown_key()

    def _require_router(self) -> None:
        if not self._transport.connected:
            raise ApiError(503, "the router cannot be reached", retry_after=1.0)

    def _ask(self, key: str) -> AsyncClient:
        """A client for questions to the router."""
        self._require_router()
        return AsyncClient(self._transport, key, timeout=ROUTER_SECONDS)

    async def _body(self, request: Request, keyless: bool = False) -> bytes:
        """`keyless`: only what is small enough to be read for anybody, ApiError (401) beyond."""
        if (coding := header(request, b"content-encoding")) not in ("", "identity"):
            raise ApiError(415, f"content-encoding: {coding} is not served; send the body as it is", "content-encoding")
        limit, refused = self._config.max_body_bytes, _too_large
        if keyless:
            limit, refused = min(limit, MOST_KEYLESS_BYTES), _keyless
        length = header(request, b"content-length")
        if length.isdigit() and int(length) > limit:
            raise refused(limit)
        parts, size, more = [], 0, True
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ApiError(400, "the body ended early")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise refused(limit)
            more = message.get("more_body", False)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    # ------------------------------------------------------------ OpenAI's API

    async def completions(self, request: Request, key: str) -> Any:
        body = schema.parse_completion(await self._body(request))
        return await self._generate(request, key, body, Reply)

    async def chat(self, request: Request, key: str) -> Any:
        body = schema.parse(_chat, await self._body(request))
        return await self._generate(request, key, body, ChatReply)

    async def _generate(
        self,
        request: Request,
        key: str,
        body: schema.Completion | schema.Chat | Messages,
        kind: type[Reply] | type[MessageReply],
        exchange_kind: type[Exchange] = Exchange,
    ) -> StreamAnswer | WholeAnswer:
        use, wanted, usage, origin = body.tool_use(), body.constraint(), body.wants_usage(), origin_of(request)
        ready = await self._ready(body, key, use, wanted)
        pins = await self._pins(body, use, ready[0].encoded.ids) if isinstance(body, Messages) else []
        self._require_router()
        reply = kind(body.model or self._config.served_model_name, self._text.tokenizer)
        reply.session = session_json(ready[0].encoded)
        exchange = exchange_kind(self._transport, self._text, reply, bool(body.stream), usage)
        exchange.names = body.names() | {"grammar": ready[0].output.field}
        exchange.settled = self._peers.settled if self._peers else None
        try:
            for one in ready:
                self._submit(exchange, one, body, key, origin, pins)
        except BaseException:
            exchange.cancel()
            raise
        if body.stream:
            return StreamAnswer(exchange, b"text/event-stream; charset=utf-8")
        return WholeAnswer(exchange)

    async def _ready(
        self, body: schema.Completion | schema.Chat | Messages, key: str, use: ToolUse, wanted: Constraint | None
    ) -> list[Ready]:
        """The prompts of a request, checked; ApiError names the field that is wrong."""
        sampling, prompts = body.sampling(self._defaults), body.prompts(use)
        found = []
        try:
            check_choices(body.choices())
            check_sampling(sampling, self._text.vocab_size)
            for prompt in prompts:
                encoded = await self._encode(prompt, key, body.cache_salt)
                found.append((prompt, encoded, self._fitted(sampling, encoded.ids)))
        except FieldError as problem:
            raise api_error(problem, body.names()) from None
        ready = []
        for prompt, encoded, fitted in found:
            output = self._output(prompt, encoded.ids, sampling, use, wanted)
            if grammar := await output.checked_grammar():
                fitted = msgspec.structs.replace(fitted, grammar=grammar)
            ready.append(Ready(prompt, encoded, fitted, output))
        return ready

    def _submit(
        self,
        exchange: Exchange,
        ready: Ready,
        body: schema.Completion | schema.Chat | Messages,
        key: str,
        origin: Origin | None,
        pins: list[tuple[int, float]],
    ) -> None:
        """Ask for the answers to one prompt."""
        prompt, encoded, sampling, output = ready.prompt, ready.encoded, ready.sampling, ready.output
        echo = isinstance(body, schema.Completion) and bool(body.echo)
        message = Generate(
            id=0,
            prompt=TokenPrompt(encoded.ids),
            sampling=sampling,
            model=body.model or "",
            n=body.choices(),
            stream=bool(body.stream) or bool(sampling.stop) or output.ends_early,
            text=False,
            origin=origin,
            api_key=key,
            cache_salt=body.cache_salt or "",
            pin=pins,
            session=facts(encoded),
            prompt_logprobs=echo and sampling.logprobs is not None,
        )
        told = functools.partial(self._told, message, prompt, encoded) if isinstance(prompt, ChatPrompt) else None
        exchange.submit(message, self._echo(prompt, encoded.ids) if echo else "", output, told)

    def _output(
        self, prompt: Prompt, ids: bytes, sampling: Sampling, use: ToolUse, wanted: Constraint | None
    ) -> Output:
        """What the answers to one prompt may be, and how they are read."""
        if isinstance(prompt, ChatPrompt):
            return self._formats.output(ids, prompt.partial, sampling.skip_special_tokens, use, wanted)
        return Output(grammar=wanted.grammar, field=wanted.field) if wanted else TEXT

    async def _encode(self, prompt: Prompt, key: str, cache_salt: str | None) -> Encoded:
        """Ids of a prompt; answers in a chat as they were generated for the same caller."""
        if isinstance(prompt, TokenPrompt):
            return Encoded(self._text.encode_now(prompt), "")
        return await self._conversations.encode(prompt, self._tenant(key), cache_salt or "", key)

    def _tenant(self, key: str) -> str:
        """Whose sessions a key may use. Without keys configured nobody is known: whatever callers send keeps them
        apart."""
        return self._tenants.get(key, key)

    def _told(self, request: Generate, prompt: ChatPrompt, encoded: Encoded, choice: Choice) -> None:
        if choice.whole:
            self.on_answer(request, prompt, encoded, choice.message.to_openai(), choice.ids)

    def on_answer(
        self, request: Generate, prompt: ChatPrompt, encoded: Encoded, message: dict[str, Any], ids: bytes
    ) -> None:
        """A choice of a chat has ended by itself or for length: its message as the client sees it, and all ids that
        were generated for it, the one that ended the turn included. `request` has the prompt's ids, the key and the
        cache salt; `prompt` is the chat as it was rendered, `encoded` what became of it. Not called for choices that
        were cut at a stop string or before a second call that was not wanted, whose ids say more than the message."""
        self._conversations.remember(encoded, message, ids, request.api_key)

    def _fitted(self, sampling: Sampling, ids: bytes) -> Sampling:
        """`sampling` within --max-model-len, if there is one (the router has its own); FieldError without room."""
        if not self._config.max_model_len:
            return sampling
        tokens = len(ids) // 4
        room = self._config.max_model_len - tokens
        if room < (sampling.max_tokens != 0):
            limit = self._config.max_model_len
            raise FieldError("prompt", too_long(tokens, limit, int(sampling.max_tokens != 0)))
        most = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        return msgspec.structs.replace(sampling, max_tokens=most)

    def _echo(self, prompt: Any, ids: bytes) -> str:
        return prompt.text if isinstance(prompt, TextPrompt) else self._text.decode_now(ids)

    # ------------------------------------------------------------ Anthropic's API

    async def messages(self, request: Request, key: str) -> Identified:
        body = schema.parse(_messages, await self._body(request))
        return Identified(await self._generate(request, key, body, MessageReply, MessageExchange))

    async def count(self, request: Request, key: str) -> Response:
        body = schema.parse(_counted, await self._body(request))
        prompt = body.prompt(body.tool_use())
        breakpoints(body)
        return json_response({"input_tokens": await self._num_tokens(prompt, key, body)})

    async def _num_tokens(self, prompt: Prompt, key: str, body: Counted | Asked) -> int:
        """Of the prompt that a body would have."""
        try:
            return len((await self._encode(prompt, key, body.cache_salt)).ids) // 4
        except FieldError as problem:
            raise api_error(problem, body.names()) from None

    async def _pins(self, body: Messages, use: ToolUse, ids: bytes) -> list[tuple[int, float]]:
        """What the breakpoints of a request pin, found in a thread: each renders the chat once more."""
        if self._text.tokenizer is None or not breakpoints(body):
            return []
        return await asyncio.to_thread(pinned, self._text.tokenizer, body, use, ids)

    # ------------------------------------------------------------ the native API

    async def native(self, request: Request) -> StreamAnswer:
        """One ClientRequest as JSON; its ClientReplies, one a line. A key in the header counts before its own. Where
        keys are configured, nobody without one in the header has a large body read."""
        key = key_of(request)
        if key:
            self._check(key)
        keyless = bool(self._tenants) and not key
        message = schema.parse(_native, await self._body(request, keyless))
        if isinstance(message, Cancel):
            raise ApiError(400, "type: a request is cancelled by closing its connection", "type")
        message.api_key = key or message.api_key
        self._check(message.api_key)
        self._require_router()
        try:
            return StreamAnswer(NativeExchange(self._transport, message), b"application/x-ndjson")
        except OverflowError:
            raise ApiError(400, "a number in the message has more than 64 bits") from None

    async def tokenize(self, request: Request, key: str) -> Response:
        body = schema.parse(_tokenize, await self._body(request))
        ids = token_list(await self._text.encode(body.to_prompt()))
        answer = {"count": len(ids), "max_model_len": await self._max_model_len(key), "tokens": ids}
        tokenizer = self._text.tokenizer
        texts = [tokenizer.token_text(i) for i in ids] if body.return_token_strs and tokenizer else None
        return json_response(answer | {"token_strs": texts})

    async def detokenize(self, request: Request, key: str) -> Response:
        body = schema.parse(_detokenize, await self._body(request))
        return json_response({"prompt": await self._text.decode(token_bytes(body.tokens), skip_special_tokens=False)})

    async def _max_model_len(self, key: str) -> int:
        return self._config.max_model_len or (await self._ask(key).health())["max_model_len"]
