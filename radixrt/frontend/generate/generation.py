"""Runs generation requests of all APIs: prepares them, sends them to the router, answers, and remembers the answers."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request

from radixrt.frontend.formats.tools import ToolUse
from radixrt.frontend.generate.choice import Choice
from radixrt.frontend.generate.exchange import Exchange
from radixrt.frontend.generate.link import RouterLink
from radixrt.frontend.generate.prepare import Body, Prompts, Ready
from radixrt.frontend.generate.shared_store import SharedStore
from radixrt.frontend.http.auth import origin_of
from radixrt.frontend.http.body import apart, is_large
from radixrt.frontend.http.errors import refuse
from radixrt.frontend.http.responses import StreamAnswer, WholeAnswer
from radixrt.frontend.openai.replies import session_json
from radixrt.frontend.openai.schema import Common, Completion
from radixrt.messages import TOKEN_BYTES, ChatPrompt, Generate, Origin, Prompt, TextPrompt, TokenPrompt
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
        body: Body,
        reply_of: Callable[..., Any],
        exchange_of: Callable[..., Exchange] = Exchange,
        pins_of: Pins | None = None,
    ) -> StreamAnswer | WholeAnswer:
        """Answer a body in the format of its API: `reply_of` makes the reply from (model, tokenizer), `exchange_of` the
        Exchange that uses it."""
        origin, large = origin_of(request), is_large(request)
        use, wanted, usage = await apart(large, lambda: (body.tool_use(), body.constraint(), body.wants_usage()))
        ready = await self._prompts.prepare(body, key, use, wanted, large)
        _check_size(body, ready)
        pins = await pins_of(body, use, ready[0].encoded.ids) if pins_of else []
        transport = self._link.reachable()
        reply = reply_of(body.model or self._model, self._text.tokenizer)
        reply.session = session_json(ready[0].encoded)
        reply.shows_reasoning = getattr(body, "include_reasoning", None) is not False
        reply.names_ids = bool(getattr(body, "return_tokens_as_token_ids", False))
        exchange = exchange_of(transport, self._text, reply, bool(body.stream), usage)
        exchange.shows_ids = bool(getattr(body, "return_token_ids", False))
        exchange.wanted = body.wanted_logprobs() if isinstance(body, Common) else None
        exchange.counts_tokens = bool(body.stream) and isinstance(body, Common) and body.counts_tokens()
        exchange.names = body.names() | {"grammar": ready[0].output.field}
        exchange.settled = self._shared_store.settled if self._shared_store else None
        try:
            await self._submit_all(exchange, ready, body, key, origin, pins)
        except BaseException:
            exchange.cancel()
            raise
        if body.stream:
            return StreamAnswer(exchange, b"text/event-stream; charset=utf-8", reply.id)
        return WholeAnswer(exchange)

    async def check_model(self, model: str | None, key: str) -> None:
        """See `RouterLink.check_model`: for requests that the router does not see otherwise."""
        await self._link.check_model(model, key)

    def on_answer(
        self, request: Generate, prompt: ChatPrompt, encoded: Encoded, message: dict[str, Any], ids: bytes
    ) -> None:
        """Called when a choice of a chat has ended by itself or by length: `message` is what the client sees, `ids` are
        all generated ids, including the one that ended the turn. `request` has the prompt's ids, the key and the cache
        salt; `prompt` is the chat that was rendered, and `encoded` the result. Not called for choices that were cut at
        a stop string, or before an additional call that was not wanted: their ids have more content than the
        message."""
        self._prompts.remember(encoded, message, ids, request.api_key)

    # ------------------------------------------------------------ parts

    async def _submit_all(self, exchange: Exchange, ready: list[Ready], *args: Any) -> None:
        """Send the requests for all prompts; of many, a few at a time, so that others are served meanwhile."""
        exchange.begin()
        for number, one in enumerate(ready, 1):
            self._submit(exchange, one, *args)
            if number % MAX_AT_ONCE == 0:
                await asyncio.sleep(0)
        exchange.begun()

    def _submit(
        self,
        exchange: Exchange,
        ready: Ready,
        body: Body,
        key: str,
        origin: Origin | None,
        pins: list[tuple[int, float]],
    ) -> None:
        """Send the request for one prompt."""
        prompt, encoded, sampling, output = ready.prompt, ready.encoded, ready.sampling, ready.output
        echo = self._echo(prompt, encoded.ids) if isinstance(body, Completion) and body.echo else None
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
            prompt_logprobs=exchange.needs_prompt_logprobs(sampling, echo),
        )
        told = functools.partial(self._told, message, prompt, encoded) if isinstance(prompt, ChatPrompt) else None
        exchange.submit(message, echo, output, told)

    def _told(self, request: Generate, prompt: ChatPrompt, encoded: Encoded, choice: Choice) -> None:
        if choice.whole:
            self.on_answer(request, prompt, encoded, choice.message.to_openai(), choice.ids)

    def _echo(self, prompt: Prompt, ids: bytes) -> str:
        return prompt.text if isinstance(prompt, TextPrompt) else self._text.decode_now(ids)


def _check_size(body: Body, ready: list[Ready]) -> None:
    """Raise ApiError (400) if there are too many choices of all prompts together, or if their prompts, which each
    choice is to repeat, are too long."""
    n = body.choices()
    if n * len(ready) > MAX_CHOICES:
        refuse("n", f"at most {MAX_CHOICES} choices of all prompts together")
    tokens = sum(len(one.encoded.ids) for one in ready) // TOKEN_BYTES
    for name in ("echo", "return_token_ids"):
        if n * tokens > MAX_REPEATED_TOKENS and getattr(body, name, None):
            refuse(name, f"at most {MAX_REPEATED_TOKENS} tokens of prompts, counted for each choice")
    if tokens > MAX_STREAMED_LOGPROBS and body.stream and getattr(body, "echo", None) and ready[0].sampling.logprobs:
        refuse("echo", f"of more than {MAX_STREAMED_LOGPROBS} tokens not with logprobs and stream")
