"""From the router to clients."""

from __future__ import annotations

from typing import Any

import msgspec

from radixrt.messages.shared import ErrorReason, FinishReason, TokenLogprob, Usage


class ToolCall(msgspec.Struct, frozen=True):
    """A call that a model makes. `arguments` is its text, usually a JSON object."""

    id: str
    name: str
    arguments: str


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """An answer in a chat, parsed by the model's own format."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = []

    def to_openai(self) -> dict[str, Any]:
        """As a message of OpenAI's format, as in the history of the next ChatPrompt."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["content"] = self.content or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


class Delta(msgspec.Struct, array_like=True):
    """New tokens of one choice of a request. The last Delta of a choice has `finish` and `usage`."""

    id: int
    index: int = 0
    ids: bytes = b""
    text: str = ""
    finish: FinishReason | None = None
    usage: Usage | None = None
    logprobs: list[TokenLogprob] | None = None
    stop: str | int | None = None
    """The stop string or token id that ended the choice."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """In the first Delta, if requested: for each prompt token except the first."""
    message: ChatMessage | None = None
    """In the last Delta of an answer to a chat: all of it, parsed. None where the model has no format of its own."""


class Deltas(msgspec.Struct, tag="deltas"):
    """All Deltas of a step for one client: one message per step, not per token."""

    items: list[Delta]


class Scored(msgspec.Struct, tag="scored"):
    """For each choice the natural log-probability of each of its tokens; `usage` is the sum over all choices."""

    id: int
    logprobs: list[list[float]]
    usage: Usage


class Tokens(msgspec.Struct, tag="tokens"):
    """The reply to a Tokenize (`ids`, and for a chat the `text` that the template rendered) or Detokenize (`text`)."""

    id: int
    ids: bytes = b""
    text: str = ""


class Info(msgspec.Struct, tag="info"):
    """The reply to an Ask or a Live (a JSON-like value; for `metrics`, Prometheus' text format), a Recall (list of
    values) or a ControlCache."""

    id: int
    data: Any


class Error(msgspec.Struct, tag="error"):
    """A request was refused or has failed. `code` is an HTTP status, `field` the invalid field of the request, if any.
    `id` is None if it is not known."""

    id: int | None
    code: int
    message: str
    field: str = ""
    retry_after: float | None = None
    """In seconds; for codes 429 and 503."""
    reason: ErrorReason | msgspec.UnsetType = msgspec.UNSET


class Done(msgspec.Struct, tag="done"):
    """The reply to a Fork, Pause, Forget or Share."""

    id: int


class Forgotten(msgspec.Struct, tag="forgotten"):
    """To clients that share values, not in reply to anything: all that a tenant has was deleted. `tenant` is a digest
    of its name (`tenant_digest`), so that others do not learn it."""

    tenant: bytes
    id: None = None


ClientReply = Deltas | Scored | Tokens | Info | Error | Done | Forgotten
