"""Validates the bodies of /v1/cache. Pure; every error names the field."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from radixrt.client import token_bytes
from radixrt.client.hints import TAIL_TOKENS
from radixrt.formats.tools import tool_use
from radixrt.frontend.generate.kv_hints import Fields, Tokens
from radixrt.frontend.generate.request import Int
from radixrt.frontend.http.errors import refuse
from radixrt.frontend.openai.schema import chat_prompt
from radixrt.messages import Name, Prompt, StatePrompt, TextPrompt, TokenPrompt

TARGETS = ("messages", "prompt", "token_ids", "response_id", "session")


class CacheBody(Fields, kw_only=True):
    """POST /v1/cache/{verb}: for exactly one of `messages`, `prompt`, `token_ids`, `response_id` and `session`. A
    `state` is one of a session's program states."""

    model: Name | None = None
    cache_salt: Name | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    template_args: dict[str, Any] | None = msgspec.field(default=None, name="chat_template_kwargs")
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    prompt: str | None = None
    token_ids: list[Int] | None = None
    response_id: str | None = None
    session: Annotated[str, msgspec.Meta(min_length=16, max_length=64)] | None = None
    state: Tokens | None = None

    @property
    def target(self) -> str:
        """The name of the field that says which path is meant."""
        return next((name for name in TARGETS if getattr(self, name) is not None), "messages")

    def check_target(self) -> None:
        """Raise ApiError (400) unless there is exactly one such field."""
        given = [name for name in TARGETS if getattr(self, name) is not None]
        if len(given) != 1:
            refuse(given[1] if given else "messages", f"exactly one of {', '.join(TARGETS)} is needed")
        if self.state is not None and self.session is None:
            refuse("state", "only with session")

    def to_prompt(self) -> Prompt | StatePrompt | None:
        """The prompt; None for a whole session, and for a response."""
        if self.messages is not None:
            return chat_prompt(self, self.messages, tool_use(self.tools, None, None).shown)
        if self.prompt is not None:
            return TextPrompt(self.prompt)
        if self.token_ids is not None:
            return TokenPrompt(token_bytes(self.token_ids))
        return StatePrompt(self.session or "", self.state) if self.state is not None else None

    @property
    def tail(self) -> int:
        """See ControlCache: what the template writes after an answer is not cached."""
        ends = self.messages and self.messages[-1].get("role") == "assistant"
        return TAIL_TOKENS if ends or self.response_id else 0
