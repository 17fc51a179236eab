"""Runs generation requests of all APIs: prepares them, sends them to the router, answers, and remembers the answers."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request

from radixrt.formats.tools import ToolUse
from radixrt.frontend.generate.answers import StreamAnswer, WholeAnswer
from radixrt.frontend.generate.choice import Choice
from radixrt.frontend.generate.exchange import Exchange
from radixrt.frontend.generate.link import RouterLink
from radixrt.frontend.generate.prepare import Prompts, Ready
from radixrt.frontend.generate.reply import BaseReply, session_json
from radixrt.frontend.generate.request import GenerationRequest, Reported
from radixrt.frontend.generate.shared_store import SharedStore
from radixrt.frontend.http.auth import origin_of, wants_explanation
from radixrt.frontend.http.body import apart, is_large
from radixrt.frontend.http.errors import refuse
from radixrt.messages import TOKEN_BYTES, CacheAction, ChatPrompt, Generate, Origin, Prompt, TextPrompt, TokenPrompt
from radixrt.tokens import Encoded, TextService
from radixrt.tokens.chat_history import facts

MAX_CHOICES = 4096
"""The most choices of a request, of all its prompts together."""
MAX_REPEATED_TOKENS = 1 << 21
"""The most tokens of prompts that are repeated in a request's answers."""
MAX_STREAMED_LOGPROBS = 2048
"""The most tokens of prompts whose log-probabilities are streamed: each takes up to 30 µs."""
MAX_AT_ONCE = 16
"""The most prompts of a request that are sent while others wait."""
Pins = Callable[[Any, ToolUse, bytes], Awaitable[list[tuple[int, float]]]]
"""Returns the pins, (tokens, seconds), that a body requests for its prompt of the given ids."""


class Generation:
    """Sends to the router what `prompts` has prepared. `model` is the name in replies to requests without one."""

    def __init__(
        self, prompts: Prompts, link: RouterLink, text: TextService, shared_store: SharedStore | None, model: str
    ) -> None:
        self._prompts = prompts
        self._link = link
        self._text = text
        self._shared_store = shared_store
        self._model = model

    async def answer(
        self,
        request: Request,
        key: str,
        body: GenerationRequest,
        reply_of: Callable[..., BaseReply],
        exchange_of: Callable[..., Exchange[Any]],
        pins_of: Pins | None = None,
    ) -> StreamAnswer | WholeAnswer:
        """Answer a body in the format of its API: `reply_of` makes the reply from (model, tokenizer), `exchange_of` the
        Exchange that uses it."""
        origin, large = origin_of(request), is_large(request)
        use, wanted, reported = await apart(large, lambda: (body.tool_use(), body.constraint(), body.reported()))
        actions = body.kv_hints.to_actions() if body.kv_hints else []
        ready = await self._prompts.prepare(body, key, use, wanted, large)
        _check_size(body, reported, ready)
        pins = await pins_of(body, use, ready[0].encoded.ids) if pins_of else []
        transport = self._link.reachable()
        reply = reply_of(body.model or self._model, self._text.tokenizer)
        reply.session, reply.reported = session_json(ready[0].encoded), reported
        reply.warnings = ready[0].output.warnings
        reply.max_tokens = _cut_to(body.token_limit(), ready[0].sampling.max_tokens)
        exchange = exchange_of(transport, self._text, reply, bool(body.stream))
        exchange.names = body.names() | {"grammar": ready[0].output.field}
        exchange.explains = wants_explanation(request)
        exchange.settled = self._shared_store.settled if self._shared_store else None
        try:
            await self._submit_all(exchange, ready, body, reported.echo, key, origin, pins, actions)
        except BaseException:
            exchange.cancel()
            raise
        if body.stream:
            return StreamAnswer(exchange, reply.content_type, reply.headers)
        return WholeAnswer(exchange)

    async def check_model(self, model: str | None, key: str) -> None:
        """See `RouterLink.check_model`: for requests that the router does not see otherwise."""
        await self._link.check_model(model, key)

    def on_answer(
        self, request: Generate, prompt: ChatPrompt, encoded: Encoded, message: dict[str, Any], ids: bytes
    ) -> None:
        """Called when a choice of a chat has ended, if it is `Choice.whole`: `message` is what the client sees, `ids`
        are all generated ids. `prompt` is the chat that was rendered, `encoded` the result."""
        self._prompts.remember(encoded, message, ids, request.api_key)

    # ------------------------------------------------------------ parts

    async def _submit_all(self, exchange: Exchange[Any], ready: list[Ready], *args: Any) -> None:
        """Send the requests for all prompts; of many, a few at a time, so that others are served meanwhile."""
        exchange.begin()
        for number, one in enumerate(ready, 1):
            self._submit(exchange, one, *args)
            if number % MAX_AT_ONCE == 0:
                await asyncio.sleep(0)
        exchange.begun()

    def _submit(
        self,
        exchange: Exchange[Any],
        ready: Ready,
        body: GenerationRequest,
        echoes: bool,
        key: str,
        origin: Origin,
        pins: list[tuple[int, float]],
        actions: list[CacheAction],
    ) -> None:
        """Send the request for one prompt."""
        prompt, encoded, sampling, output = ready.prompt, ready.encoded, ready.sampling, ready.output
        echo = self._echo(prompt, encoded.ids) if echoes else None
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
            priority=body.priority or 0,
            pin=pins,
            cache=actions,
            session=facts(encoded),
            prompt_logprobs=exchange.needs_prompt_logprobs(sampling, echo),
            explain=exchange.explains and not exchange.prompts,
        )
        told = functools.partial(self._told, message, prompt, encoded) if isinstance(prompt, ChatPrompt) else None
        exchange.submit(message, echo, output, told)

    def _told(self, request: Generate, prompt: ChatPrompt, encoded: Encoded, choice: Choice) -> None:
        if choice.whole:
            self.on_answer(request, prompt, encoded, choice.message.to_openai(), choice.ids)

    def _echo(self, prompt: Prompt, ids: bytes) -> str:
        return prompt.text if isinstance(prompt, TextPrompt) else self._text.decode_now(ids)


def _cut_to(asked: int | None, given: int | None) -> int | None:
    """For how many tokens there is room, if more are asked for."""
    return given if asked is not None and given is not None and given < asked else None


def _check_size(body: GenerationRequest, reported: Reported, ready: list[Ready]) -> None:
    """Raise ApiError (400) if there are too many choices of all prompts together, or if their prompts, which each
    choice is to repeat, are too long."""
    n = body.choices()
    if n * len(ready) > MAX_CHOICES:
        refuse("n", f"at most {MAX_CHOICES} choices of all prompts together")
    tokens = sum(len(one.encoded.ids) for one in ready) // TOKEN_BYTES
    for name, repeats in (("echo", reported.echo), ("return_token_ids", reported.token_ids)):
        if n * tokens > MAX_REPEATED_TOKENS and repeats:
            refuse(name, f"at most {MAX_REPEATED_TOKENS} tokens of prompts, counted for each choice")
    if tokens > MAX_STREAMED_LOGPROBS and body.stream and reported.echo and ready[0].sampling.logprobs:
        refuse("echo", f"of more than {MAX_STREAMED_LOGPROBS} tokens not with logprobs and stream")
