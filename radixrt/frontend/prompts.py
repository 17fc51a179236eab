"""Prompts of requests made ready to be asked: their ids, how tokens are drawn, and how the answers are read.

body --prepare--> Ready ... answered ... --remember--> the prompts of the next turn
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from radixrt.config import FrontendConfig
from radixrt.frontend.defaults import Defaults, sampling_defaults
from radixrt.frontend.errors import api_error
from radixrt.frontend.output import TEXT, Formats, Output
from radixrt.frontend.peers import Peers
from radixrt.frontend.structured import Constraint
from radixrt.frontend.tools import ToolUse
from radixrt.messages import TOKEN_BYTES, ChatPrompt, Prompt, Sampling, TokenPrompt
from radixrt.router.conversations import Conversations
from radixrt.router.errors import FieldError, too_long
from radixrt.router.tokens import Encoded, TextService
from radixrt.router.validate import check_choices, check_sampling


class PromptBody(Protocol):
    """A body with a prompt that can be counted."""

    cache_salt: str | None

    def names(self) -> dict[str, str]:
        """How the caller calls the fields of a message."""


class Body(PromptBody, Protocol):
    """A body that asks for answers, of any API. Its methods raise ApiError (400) for what is wrong or not served."""

    model: str | None
    stream: bool | None

    def tool_use(self) -> ToolUse:
        """What an answer may do with tools."""

    def constraint(self) -> Constraint | None:
        """What the text must be."""

    def wants_usage(self) -> bool:
        """Whether a stream tells the usage."""

    def choices(self) -> int:
        """Choices of each prompt."""

    def prompts(self, use: ToolUse) -> list[Prompt]:
        """The prompts; a chat's template is shown what may be used."""

    def sampling(self, defaults: Defaults) -> Sampling:
        """How tokens are drawn; `defaults` where the request does not say."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A prompt of a request, and how it is to be answered."""

    prompt: Prompt
    encoded: Encoded
    sampling: Sampling
    """With its grammar, and within the room there is."""
    output: Output


class Prompts:
    """`tenant` names whom a key belongs to: answers in a chat are found as they were generated for the same one."""

    def __init__(
        self, config: FrontendConfig, text: TextService, peers: Peers | None, tenant: Callable[[str], str]
    ) -> None:
        self._text = text
        self._tenant = tenant
        self._max_model_len = config.max_model_len
        self._conversations = Conversations(text, config, peers)
        self._formats = Formats(text.tokenizer, config.tool_call_parser, config.reasoning_parser)
        self._defaults = sampling_defaults(config.generation_config, text.generation)

    async def prepare(self, body: Body, key: str, use: ToolUse, wanted: Constraint | None) -> list[Ready]:
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

    async def num_tokens(self, prompt: Prompt, key: str, body: PromptBody) -> int:
        """Of the prompt that a body would have."""
        try:
            return len((await self._encode(prompt, key, body.cache_salt)).ids) // TOKEN_BYTES
        except FieldError as problem:
            raise api_error(problem, body.names()) from None

    def remember(self, encoded: Encoded, message: dict[str, Any], ids: bytes, key: str) -> None:
        """Keep the ids of an answer to a chat, for prompts that it comes back in."""
        self._conversations.remember(encoded, message, ids, key)

    # ------------------------------------------------------------ parts

    async def _encode(self, prompt: Prompt, key: str, cache_salt: str | None) -> Encoded:
        """Ids of a prompt; answers in a chat as they were generated for the same caller."""
        if isinstance(prompt, TokenPrompt):
            return Encoded(self._text.encode_now(prompt), "")
        return await self._conversations.encode(prompt, self._tenant(key), cache_salt or "", key)

    def _fitted(self, sampling: Sampling, ids: bytes) -> Sampling:
        """`sampling` within --max-model-len, if there is one (the router has its own); FieldError without room."""
        if not self._max_model_len:
            return sampling
        tokens = len(ids) // TOKEN_BYTES
        room = self._max_model_len - tokens
        if room < (sampling.max_tokens != 0):
            raise FieldError("prompt", too_long(tokens, self._max_model_len, int(sampling.max_tokens != 0)))
        most = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        return msgspec.structs.replace(sampling, max_tokens=most)

    def _output(
        self, prompt: Prompt, ids: bytes, sampling: Sampling, use: ToolUse, wanted: Constraint | None
    ) -> Output:
        """What the answers to one prompt may be, and how they are read."""
        if isinstance(prompt, ChatPrompt):
            return self._formats.output(ids, prompt.partial, sampling.skip_special_tokens, use, wanted)
        return Output(grammar=wanted.grammar, field=wanted.field) if wanted else TEXT
