"""Types of the client's interface: prompts in any form, token ids, completions."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, TypedDict, TypeGuard, cast, overload

import msgspec

from radixrt.messages import (
    CacheAction,
    ChatMessage,
    ChatPrompt,
    Delta,
    FinishReason,
    Origin,
    PartsPrompt,
    Prompt,
    StatePrompt,
    TextPrompt,
    TokenLogprob,
    TokenPrompt,
    ToolCall,
    Usage,
)

TextLike = str | Sequence[int] | TextPrompt | TokenPrompt
WholePromptLike = TextLike | Sequence[dict[str, Any]] | Prompt
PromptLike = WholePromptLike | StatePrompt


class Options(TypedDict, total=False):
    """What every request of a client may have; see `AsyncClient.generate_n`."""

    model: str
    origin: Origin
    cache_salt: str
    priority: int


class GenerateOptions(Options, total=False):
    """And what those may have that generate."""

    cache: Sequence[CacheAction]


class Parsed:
    """What an answer says by its model's own format. `message` is None where that has none, and for prompts that are no
    chat: then all text is content."""

    __slots__ = ()
    text: str
    message: ChatMessage | None

    @property
    def content(self) -> str:
        """The text, without thoughts and calls."""
        return self.text if self.message is None else self.message.content

    @property
    def reasoning(self) -> str:
        """The thoughts."""
        return "" if self.message is None else self.message.reasoning

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls that the model makes. With `finish` "length" the last one may be cut."""
        return [] if self.message is None else self.message.tool_calls

    def to_openai(self) -> dict[str, Any]:
        """The answer as a message for the history of the next chat, in OpenAI's format."""
        return (self.message or ChatMessage(self.text)).to_openai()


class Completion(msgspec.Struct, Parsed):
    """One finished choice. `ids`: the generated token ids, as little-endian int32; `logprobs`: one for each of them.
    `text` is all that was generated, as the model wrote it, without special tokens."""

    text: str = ""
    ids: bytes = b""
    finish: FinishReason = "stop"
    stop: str | int | None = None
    usage: Usage = Usage()
    logprobs: list[TokenLogprob] | None = None
    message: ChatMessage | None = None

    @property
    def token_ids(self) -> list[int]:
        return token_list(self.ids)

    def add(self, delta: Delta) -> None:
        """Add the next delta of the choice."""
        self.text += delta.text
        self.ids += delta.ids
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
        if delta.finish is not None:
            self.finish, self.stop, self.usage = delta.finish, delta.stop, delta.usage or Usage()
            self.message = delta.message


def token_bytes(ids: Sequence[int]) -> bytes:
    """Token ids as in messages: little-endian int32. Raises OverflowError for ids that are not in int32's range."""
    return array("i", ids).tobytes()


def token_list(ids: bytes) -> list[int]:
    """The inverse of `token_bytes`."""
    return array("i", ids).tolist()


@overload
def as_prompt(prompt: TextLike) -> TextPrompt | TokenPrompt: ...


@overload
def as_prompt(prompt: WholePromptLike) -> Prompt: ...


@overload
def as_prompt(prompt: PromptLike) -> Prompt | StatePrompt: ...


def as_prompt(prompt: PromptLike) -> Prompt | StatePrompt:
    """Convert text, token ids or chat messages to the corresponding prompt message. Raises TypeError for anything
    else."""
    match prompt:
        case str():
            return TextPrompt(prompt)
        case TextPrompt() | TokenPrompt() | ChatPrompt() | PartsPrompt() | StatePrompt():
            return prompt
        case [dict(), *_]:
            return ChatPrompt(cast("list[dict[str, Any]]", list(prompt)))
        case [*ids] if _are_ids(ids):
            return TokenPrompt(token_bytes(ids))
    raise TypeError(f"a prompt is text, token ids, or chat messages, not {type(prompt).__name__}")


def _are_ids(items: list[Any]) -> TypeGuard[list[int]]:
    return all(isinstance(item, int) for item in items)
