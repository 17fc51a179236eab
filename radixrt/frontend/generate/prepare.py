"""Prepares the prompts of requests: their token ids, sampling parameters, and how answers are parsed.

body --prepare--> Ready ... answered ... --remember--> the prompts of the next turn
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec

from radixrt.config import FrontendConfig
from radixrt.formats.output import TEXT, Formats, Output
from radixrt.formats.structured import Constraint
from radixrt.formats.tools import ToolUse
from radixrt.frontend.generate.bad_words import MAX_BAD_WORDS, MAX_CHARS, spellings
from radixrt.frontend.generate.defaults import sampling_defaults
from radixrt.frontend.generate.request import GenerationRequest
from radixrt.frontend.generate.shared_store import SharedStore
from radixrt.frontend.http.body import apart
from radixrt.frontend.http.errors import api_error, refuse
from radixrt.messages import TOKEN_BYTES, ChatPrompt, Namespace, PartsPrompt, Prompt, Sampling, TextPrompt, TokenPrompt
from radixrt.requests.validate import check_choices, check_sampling
from radixrt.tokens import Encoded, TextService
from radixrt.tokens.chat_history import Conversations
from radixrt.tokens.errors import FieldError, Room
from radixrt.tokens.turns import Result, in_one_step

LONG_PROMPT_CHARS = 65_536
"""Of prompts with more characters it is known before they are encoded how many tokens they may have."""


class Ready(NamedTuple):
    """A prompt of a request, and how it is to be answered."""

    prompt: Prompt
    encoded: Encoded
    sampling: Sampling
    """With the grammar, and max_tokens within the available room."""
    output: Output


class Prompts:
    """`tenant` returns the tenant of a key: answers in a chat get the ids that were generated for the same tenant.
    `longest` asks the router, with a key, for its max_model_len (0: not known)."""

    def __init__(
        self,
        config: FrontendConfig,
        text: TextService,
        shared_store: SharedStore | None,
        tenant: Callable[[str], str],
        longest: Callable[[str], Awaitable[int]] | None = None,
    ) -> None:
        self._text = text
        self._tenant = tenant
        self._longest = longest
        self._max_model_len = config.max_model_len
        self._conversations = Conversations(text, config, shared_store)
        self.formats = Formats(text.tokenizer, config.tool_call_parser, config.reasoning_parser)
        self._defaults = sampling_defaults(config.generation_config, text.generation)

    async def prepare(
        self, body: GenerationRequest, key: str, use: ToolUse, wanted: Constraint | None, large: bool = False
    ) -> list[Ready]:
        """Prepare the prompts of a request, which may be `large`. Raises ApiError that names an invalid field."""
        sampling, prompts = await apart(large, lambda: (body.sampling(self._defaults), body.prompts(use)))
        if body.bad_words:
            spelled = await self._spelled(body.bad_words, self.namespace(key, body.cache_salt))
            sampling = msgspec.structs.replace(sampling, bad_token_ids=spelled)
        found = []
        try:
            check_choices(body.choices())
            check_sampling(sampling, self._text.vocab_size)
            most = body.most_prompt_tokens()
            for prompt in prompts:
                room = None if most else await self._room(prompt, sampling, key)
                encoded = await self._encode(prompt, key, body.cache_salt, room, most)
                if most and len(encoded.ids) > most * TOKEN_BYTES:
                    encoded = encoded._replace(ids=encoded.ids[-most * TOKEN_BYTES :])
                    prompt = prompt if isinstance(prompt, ChatPrompt) else TokenPrompt(encoded.ids)
                found.append((prompt, encoded, self._fitted(sampling, encoded.ids)))
        except FieldError as problem:
            raise api_error(problem, body.names()) from None
        ready = []
        for prompt, encoded, fitted in found:
            output = self._output(prompt, encoded.ids, sampling, use, wanted)
            if grammar := await output.checked_grammar(key):
                fitted = msgspec.structs.replace(fitted, grammar=grammar)
            ready.append(Ready(prompt, encoded, fitted, output))
        return ready

    async def num_tokens(self, prompt: Prompt, key: str, body: GenerationRequest) -> int:
        """The number of tokens of a body's prompt."""
        try:
            return len((await self._encode(prompt, key, body.cache_salt)).ids) // TOKEN_BYTES
        except FieldError as problem:
            raise api_error(problem, body.names()) from None

    async def encode(self, prompt: Prompt, key: str, cache_salt: str | None, names: dict[str, str]) -> bytes:
        """The token ids of a prompt, int32 bytes. `names` maps fields to the caller's, for errors."""
        try:
            return (await self._encode(prompt, key, cache_salt)).ids
        except FieldError as problem:
            raise api_error(problem, names) from None

    def remember(self, encoded: Encoded, message: dict[str, Any], ids: bytes, key: str) -> None:
        """Keep the ids of an answer to a chat, for later prompts that contain it."""
        self._conversations.remember(encoded, message, ids, key)

    def forget(self, is_meant: Callable[[str], bool]) -> None:
        """See Conversations."""
        self._conversations.forget(is_meant)

    # ------------------------------------------------------------ parts

    def namespace(self, key: str, cache_salt: str | None) -> Namespace:
        """The namespace in which a caller's texts are encoded."""
        return Namespace(self._tenant(key), salt=cache_salt or "")

    async def aside(self, key: str, work: Callable[..., Result], *args: Any) -> Result:
        """Run `work`, which renders or encodes something, in the tokenizer's threads, in turn with the others'. Raises
        ApiError if it takes too much time."""
        try:
            return await self._text.run(self.namespace(key, None), in_one_step(work, *args))
        except FieldError as problem:
            raise api_error(problem, {}) from None

    async def _encode(
        self, prompt: Prompt, key: str, cache_salt: str | None, room: Room | None = None, last: int | None = None
    ) -> Encoded:
        """Encode a prompt, or at least its `last` ids; answers in a chat get the ids that were generated for the same
        caller."""
        if isinstance(prompt, TokenPrompt):
            return Encoded(self._text.encode_now(prompt), "")
        return await self._conversations.encode(prompt, self._tenant(key), cache_salt or "", key, room, last)

    async def _room(self, prompt: Prompt, sampling: Sampling, key: str) -> Room | None:
        """What a long prompt has to fit into, so that its encoding can end early; None for others, which are checked
        when they are encoded."""
        if _chars(prompt) <= LONG_PROMPT_CHARS:
            return None
        limit = self._max_model_len or (await self._longest(key) if self._longest else 0)
        return Room(limit, int(sampling.max_tokens != 0)) if limit else None

    async def _spelled(self, words: list[str], namespace: Namespace) -> tuple[tuple[int, ...], ...]:
        """The token ids of words that are not to be generated. Raises ApiError if they are too many or empty."""
        tokenizer = self._text.tokenizer
        if tokenizer is None:
            refuse("bad_words", "need a tokenizer, and none is loaded")
        if len(words) > MAX_BAD_WORDS or any(len(word) > MAX_CHARS for word in words):
            refuse("bad_words", f"at most {MAX_BAD_WORDS} words of {MAX_CHARS} characters")
        if not all(word.strip() for word in words):
            refuse("bad_words", "must not hold an empty word")
        return await asyncio.to_thread(spellings, tokenizer, words, namespace)

    def _fitted(self, sampling: Sampling, ids: bytes) -> Sampling:
        """`sampling` with max_tokens within --max-model-len, if that is set (the router has its own limit). Raises
        FieldError if there is no room."""
        if not self._max_model_len:
            return sampling
        tokens = len(ids) // TOKEN_BYTES
        Room(self._max_model_len, int(sampling.max_tokens != 0)).check(tokens)
        room = self._max_model_len - tokens
        most = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        return msgspec.structs.replace(sampling, max_tokens=most)

    def _output(
        self, prompt: Prompt, ids: bytes, sampling: Sampling, use: ToolUse, wanted: Constraint | None
    ) -> Output:
        """How the answers to one prompt are constrained and parsed."""
        if isinstance(prompt, ChatPrompt):
            return self.formats.output(ids, prompt.partial, sampling.skip_special_tokens, use, wanted)
        return Output(grammar=wanted.grammar, field=wanted.field) if wanted else TEXT


def _chars(prompt: Prompt) -> int:
    """About the characters of a prompt that is to be encoded."""
    match prompt:
        case TextPrompt(text=text):
            return len(text)
        case ChatPrompt(messages=messages):
            return sum(map(_content_chars, messages))
        case PartsPrompt(parts=parts):
            return sum(len(part.text) for part in parts if isinstance(part, TextPrompt))
    return 0


def _content_chars(message: dict[str, Any]) -> int:
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return sum(len(text) for text in texts if isinstance(text, str))
    return len(content) if isinstance(content, str) else 0
