"""POST /v1/cache/{verb} and DELETE /v1/cache: hints to the cache, and what became of them."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from radixrt.client import AsyncClient, ServerError
from radixrt.frontend.cache.schema import CacheBody
from radixrt.frontend.generate.kv_hints import VERBS
from radixrt.frontend.generate.prepare import Prompts
from radixrt.frontend.http.auth import Handler, KeyedHandler, json_response
from radixrt.frontend.http.body import SIZE, apart, is_large
from radixrt.frontend.http.codec import parse
from radixrt.frontend.http.errors import api_error
from radixrt.frontend.responses.routes import Responses
from radixrt.messages import CacheAction, CacheVerb, ControlCache, StatePrompt, TokenPrompt
from radixrt.requests.validate import check_action
from radixrt.tokens.errors import FieldError
from radixrt.tokens.quota import BYTES_PER_TOKEN, MIN_HINT_TOKENS, Budget

CACHE_PATH = "/v1/cache"
NAMES = {"action.seconds": "ttl", "action.token_start": "token_start", "action.token_end": "token_end"}
NAMES |= {"action.destination": "destination", "prompt.state": "state"}
"""The names of a message's fields here."""
_body = msgspec.json.Decoder(CacheBody)


class CacheRoutes:
    """`ask` returns a client with an API key; `read` reads a body; `tenant` returns the tenant of a key;
    `forget` deletes what this process keeps of a tenant."""

    def __init__(
        self,
        ask: Callable[[str], AsyncClient],
        prompts: Prompts,
        responses: Responses,
        read: Callable[[Request], Awaitable[bytes]],
        tenant: Callable[[str], str],
        forget: Callable[[str], None],
    ) -> None:
        self._ask = ask
        self._prompts = prompts
        self._responses = responses
        self._read = read
        self._tenant = tenant
        self._forget = forget
        self._budget = Budget()

    def posts(self, guarded: Callable[[KeyedHandler], Handler]) -> dict[str, Handler]:
        """The handlers of the verbs, by path."""
        return {f"{CACHE_PATH}/{verb}": guarded(functools.partial(self.hint, verb)) for verb in VERBS}

    def routes(self, guarded: Callable[[KeyedHandler], Handler]) -> list[Route]:
        return [Route(CACHE_PATH, guarded(self.delete), methods=["DELETE"])]

    async def hint(self, verb: CacheVerb, request: Request, key: str) -> Response:
        body = parse(_body, await self._read(request))
        body.check_target()
        try:
            check_action(action := body.action(verb), "action")
        except FieldError as problem:
            raise api_error(problem, NAMES) from None
        cost = max(MIN_HINT_TOKENS, request.scope.get(SIZE, 0) // BYTES_PER_TOKEN)
        if wait := self._budget.take(self._tenant(key), cost, time.monotonic()):
            why = "the tenant has given too many hints for now"
            refused: dict[str, Any] = {"result": "refused", "tokens": 0, "bytes": 0, "worker": "", "reason": why}
            return json_response(refused | {"retry_after": wait})
        message = ControlCache(
            id=0,
            action=action,
            session="" if body.state is not None else body.session or "",
            model=body.model or "",
            cache_salt=body.cache_salt or "",
            tail=body.tail,
            api_key=key,
        )
        prompt = await apart(is_large(request), body.to_prompt)
        if body.response_id is not None:
            prompt = await self._responses.prompt_of(body.response_id, body.cache_salt or "", key)
            if prompt is None:
                return json_response({"result": "missing", "tokens": 0, "bytes": 0, "worker": ""})
        if prompt is not None and not isinstance(prompt, StatePrompt):
            names = {"template_args": "chat_template_kwargs", "prompt": body.target}
            prompt = TokenPrompt(await self._prompts.encode(prompt, key, body.cache_salt, names))
        message.prompt = prompt
        try:
            return json_response(await self._ask(key).control_cache(message))
        except ServerError as problem:
            raise api_error(problem, NAMES | {"prompt": body.target}) from None

    async def delete(self, request: Request, key: str) -> Response:
        """Delete all that a tenant has: here, in the router, and on all workers."""
        self._forget(self._tenant(key))
        message = ControlCache(id=0, action=CacheAction("delete"), api_key=key)
        return json_response(await self._ask(key).control_cache(message))
