"""The HTTP application: routes, keys, the body limit, errors."""

from __future__ import annotations

import contextlib
import functools
import hmac
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from radixrt.client.transports import NATIVE_PATH, Here, ServerError
from radixrt.config import FrontendConfig
from radixrt.frontend.anthropic.routes import MessageRoutes
from radixrt.frontend.cache.routes import CacheRoutes
from radixrt.frontend.generate.answers import StreamAnswer, WholeAnswer
from radixrt.frontend.generate.generation import Generation
from radixrt.frontend.generate.link import RouterLink
from radixrt.frontend.generate.prepare import Prompts
from radixrt.frontend.generate.shared_store import SharedStore
from radixrt.frontend.http.anthropic_errors import AnthropicError
from radixrt.frontend.http.auth import MESSAGES_PATH, Application, Handler, KeyedHandler, count_for, for_pages, key_of
from radixrt.frontend.http.body import Bodies, Held, check_shape, read_body, release
from radixrt.frontend.http.codec import parse
from radixrt.frontend.http.errors import ApiError, api_error
from radixrt.frontend.http.hosts import RequestFilter
from radixrt.frontend.http.info_routes import CLEAR_PATHS, InfoRoutes
from radixrt.frontend.http.ollama_errors import OllamaError
from radixrt.frontend.http.worker_routes import DRAIN_PATH, WorkerRoutes
from radixrt.frontend.live.routes import LiveRoutes
from radixrt.frontend.native.routes import Native
from radixrt.frontend.ollama.routes import OllamaRoutes
from radixrt.frontend.openai.exchange import OpenAIExchange
from radixrt.frontend.openai.lora_routes import ADAPTER_PATHS, AdapterRoutes
from radixrt.frontend.openai.replies import ChatReply, Reply
from radixrt.frontend.openai.schema import Chat, cut_prompt, parse_completion
from radixrt.frontend.openai.tokenization import Tokenization
from radixrt.frontend.responses.routes import RESPONSES_PATH, Responses
from radixrt.frontend.responses.sealed import Seals
from radixrt.messages import ChangeAdapter, DrainWorker
from radixrt.messages.namespace import tenant_digest
from radixrt.requests.validate import parse_api_keys
from radixrt.tokens import TextService
from radixrt.tokens.errors import FieldError

MAX_NATIVE_KEYLESS_BYTES = 8 << 10
"""The most bytes of a native message that are read before its key, which is in the message, is checked."""
_chat = msgspec.json.Decoder(Chat)


class Frontend:
    """The handlers of one process. `app` is the ASGI application. Its lifespan opens the connection to the router: to
    `here`, a router on the same event loop, or to the one at `config.router`."""

    def __init__(self, config: FrontendConfig, text: TextService, here: Here | None = None) -> None:
        self.config = config
        self._tenants = parse_api_keys(config.api_key)
        self._bodies = Bodies()
        self._link = RouterLink(config.router, here)
        self._shared_store = SharedStore(lambda: self._link.transport) if config.share_sessions else None
        self._prompts = prompts = Prompts(config, text, self._shared_store, self._tenant, self._link.max_model_len)
        self.generation = Generation(prompts, self._link, text, self._shared_store, config.served_model_name)
        self._responses = responses = Responses(
            config.response_bytes,
            self._shared_store,
            self.generation,
            prompts,
            self._body,
            self._tenant,
            Seals(self._tenants),
        )
        messages = MessageRoutes(self.generation, prompts, text.tokenizer, self._body)
        ollama = OllamaRoutes(self.generation, self._link.ask, prompts.formats, self._body)
        for_ollama = functools.partial(self._guarded, told=OllamaError.wrap)
        cache = CacheRoutes(self._link.ask, prompts, responses, self._body, self._tenant, self.forget_tenant)
        tokenization = Tokenization(text, self._link, config.max_model_len, self._body, prompts.namespace)
        posts = {
            "/v1/completions": self._guarded(self.completions),
            "/v1/chat/completions": self._guarded(self.chat),
            RESPONSES_PATH: self._guarded(responses.create),
            f"{RESPONSES_PATH}/input_tokens": self._guarded(responses.count),
            MESSAGES_PATH: self._guarded(messages.create, AnthropicError.wrap),
            f"{MESSAGES_PATH}/count_tokens": self._guarded(messages.count, AnthropicError.wrap),
            NATIVE_PATH: Native(self._link, self._admit_admin, self._body, self._restrict).handle,
            "/tokenize": self._guarded(tokenization.tokenize),
            "/detokenize": self._guarded(tokenization.detokenize),
            **ollama.posts(for_ollama),
            **cache.posts(self._guarded),
        }
        self.live = LiveRoutes(self._link.ask, bool(self._tenants))
        others = [
            Route(f"{RESPONSES_PATH}/{{id}}", self._guarded(responses.get), methods=["GET"]),
            Route(f"{RESPONSES_PATH}/{{id}}", self._guarded(responses.delete), methods=["DELETE"]),
            Route(f"{RESPONSES_PATH}/{{id}}/input_items", self._guarded(responses.input_items), methods=["GET"]),
            *ollama.routes(for_ollama),
            *cache.routes(self._guarded),
            *InfoRoutes(self._link.ask).routes(self._guarded, self._guarded_for_admin),
            *self.live.routes(self._guarded_for_admin),
            *AdapterRoutes(self._link.ask, self._unchecked_body, self._restrict).routes(self._unchecked),
            *WorkerRoutes(self._link.ask, self._unchecked_body, self._restrict).routes(self._unchecked),
        ]
        pages = for_pages(Application(posts, others, self._lifespan), config.allowed_origins)
        self.app = RequestFilter(pages, config, (NATIVE_PATH, *CLEAR_PATHS, *ADAPTER_PATHS, DRAIN_PATH))

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        self._link.open()
        self._link.transport.on_forgotten = self._forget
        try:
            await self._link.wait()
            yield
        finally:
            await self.close()

    def forget_tenant(self, tenant: str) -> None:
        """Drop what this process keeps of a tenant's conversations: all of it where there are no API keys, since any
        key is a tenant's name then. The router tells the other processes (`Handlers.forget_tenant`)."""
        self._forget(tenant_digest(tenant))

    def _forget(self, digest: bytes) -> None:
        def is_meant(tenant: str) -> bool:
            return not self._tenants or tenant_digest(tenant) == digest

        self._prompts.forget(is_meant)
        self._responses.forget(is_meant)

    async def close(self) -> None:
        """End the streams of the live page, and see RouterLink."""
        self.live.close()
        await self._link.close()

    # ------------------------------------------------------------ OpenAI's API

    async def completions(self, request: Request, key: str) -> StreamAnswer | WholeAnswer:
        raw = await self._read(request)
        rest, ids = cut_prompt(raw)
        await check_shape(rest)
        body = parse_completion(rest, ids)
        return await self.generation.answer(request, key, body, Reply, OpenAIExchange)

    async def chat(self, request: Request, key: str) -> StreamAnswer | WholeAnswer:
        body = parse(_chat, await self._body(request))
        return await self.generation.answer(request, key, body, ChatReply, OpenAIExchange)

    # ------------------------------------------------------------ keys, limits, errors

    def _guarded(
        self,
        handler: KeyedHandler,
        told: Callable[[ApiError], ApiError] = lambda error: error,
        checked: bool = True,
    ) -> Handler:
        """Wrap a handler: it gets the caller's key, which must be valid if keys are configured, unless it is not
        `checked`. Errors are sent in OpenAI's format, or as `told` converts them. No local variable may keep an error:
        its traceback refers to this frame and those below with the body, and such a cycle would live until the garbage
        collector runs, which is seldom (`radixrt.process.gc_tuning`)."""

        async def guarded(request: Request) -> Any:
            try:
                key = key_of(request)
                if checked:
                    self._admit(request, key)
                return await handler(request, key)
            except (ApiError, FieldError, ServerError) as problem:
                return _response(told(api_error(problem)))
            finally:
                release(request)

        return guarded

    def _unchecked(self, handler: KeyedHandler) -> Handler:
        """As `_guarded`, for handlers that check the key themselves."""
        return self._guarded(handler, checked=False)

    def _guarded_for_admin(self, handler: KeyedHandler) -> Handler:
        """As `_guarded`; the admin's key is valid as well."""

        async def for_admin(request: Request, key: str) -> Any:
            self._admit_admin(request, key)
            return await handler(request, key)

        return self._unchecked(for_admin)

    def _restrict(self, message: ChangeAdapter | DrainWorker) -> None:
        """Set who may change a LoRA adapter, or drain a worker, as far as this front end knows."""
        message.admin_only = bool(self._tenants)

    def _admit(self, request: Request, key: str) -> None:
        """Raise ApiError (401) for an unknown key."""
        self._check(key)
        count_for(request, self._tenants.get(key, ""))

    def _admit_admin(self, request: Request, key: str) -> None:
        """As `_admit`; the admin's key is valid as well. It is no tenant's, so that what is not the admin's to ask is
        refused by the router."""
        if not _equal(key, self.config.admin_api_key):
            self._admit(request, key)

    def _check(self, key: str) -> None:
        if self._tenants and not any(_equal(key, known) for known in self._tenants):
            raise _unknown_key()

    def _tenant(self, key: str) -> str:
        """The tenant whose sessions a key may use. If no keys are configured, any key is taken as a tenant's name,
        which keeps callers apart."""
        return self._tenants.get(key, key)

    async def _body(self, request: Request, keyless: bool = False) -> bytes:
        """The body, which is JSON that is not parsed yet. `keyless`: its key is not checked yet."""
        body = await self._read(request, keyless)
        await check_shape(body)
        return body

    async def _unchecked_body(self, request: Request) -> bytes:
        """As `_body`, of a request whose key is not checked."""
        return await self._body(request, keyless=True)

    async def _read(self, request: Request, keyless: bool = False) -> bytes:
        """Read the body. If it is `keyless`, and keys are configured, more than MAX_NATIVE_KEYLESS_BYTES raise ApiError
        (401)."""
        if keyless and self._tenants:
            limit = min(self.config.max_body_bytes, MAX_NATIVE_KEYLESS_BYTES)
            return await read_body(request, limit, _keyless)
        held = Held(self._bodies, self._tenants.get(key_of(request), ""))
        return await read_body(request, self.config.max_body_bytes, _too_large, held)


def _equal(key: str, known: str) -> bool:
    """Whether a key is a known one, which is not ""; takes a time that does not tell how much of it is equal."""
    return bool(known) and hmac.compare_digest(key.encode(), known.encode())


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes (--max-body-bytes)")


def _unknown_key(more: str = "") -> ApiError:
    return ApiError(401, f"unknown API key{more}", code="invalid_api_key")


def _keyless(limit: int) -> ApiError:
    return _unknown_key(f": a message of more than {limit} bytes needs it in a header")


def _response(error: ApiError) -> Response:
    return Response(error.body(), error.status, error.headers(), "application/json")
