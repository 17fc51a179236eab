"""Prompts: text, token ids, a chat, or the history of a program."""

from __future__ import annotations

from typing import Any

import msgspec

from radixrt.messages.replies import ChatMessage
from radixrt.messages.shared import Count, Number, Sampling, Scope

GONE = 410
"""Code of the Error for a state that the router does not know, or has dropped."""


class TextPrompt(msgspec.Struct, tag="text", frozen=True):
    text: str
    add_special_tokens: bool = True


class TokenPrompt(msgspec.Struct, tag="ids", frozen=True):
    ids: bytes


class ChatPrompt(msgspec.Struct, tag="chat", frozen=True):
    """Messages and tools in OpenAI's format. With `partial`, the last (assistant) message is continued. `template_args`
    are passed to the chat template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    partial: bool = False
    template_args: dict[str, Any] = {}


class PartsPrompt(msgspec.Struct, tag="parts", frozen=True):
    """Parts encoded one by one and concatenated, so that a generated part keeps its exact ids."""

    parts: list[TextPrompt | TokenPrompt]


Prompt = TextPrompt | TokenPrompt | ChatPrompt | PartsPrompt


class TextSegment(msgspec.Struct, tag="text", frozen=True, array_like=True):
    """Text in an open message of the assistant, or in a history without roles."""

    text: str


class ToolsSegment(msgspec.Struct, tag="tools", frozen=True, array_like=True):
    """From here on the chat has these tools, in OpenAI's format, and no others."""

    tools: list[dict[str, Any]]


class MessageSegment(msgspec.Struct, tag="message", frozen=True, array_like=True):
    """A complete chat message. The result of a call has the call's id, and the `name` of the function."""

    role: str
    content: str
    tool_call_id: str = ""
    name: str = ""


class AssistantTurnStart(msgspec.Struct, tag="begins", frozen=True, array_like=True):
    """A message of the assistant begins, and is open from now on."""


class AssistantTurnEnd(msgspec.Struct, tag="ends", frozen=True, array_like=True):
    """The open message is complete."""


class ChoiceSegment(msgspec.Struct, tag="choice", frozen=True, array_like=True):
    """The selected choice of a Score. It is encoded on its own, with the token ids that were scored."""

    text: str


class GeneratedSegment(msgspec.Struct, tag="answer", frozen=True, array_like=True):
    """A generated continuation: all its token ids, the text and the `stop` of its Deltas, its sampling parameters, and
    the parsed `message`."""

    ids: bytes
    text: str
    stop: str | Count | None
    sampling: Sampling
    message: ChatMessage | None = None


Segment = (
    TextSegment | ToolsSegment | MessageSegment | AssistantTurnStart | AssistantTurnEnd | ChoiceSegment
    | GeneratedSegment
)  # fmt: skip


class StatePrompt(msgspec.Struct, tag="state", frozen=True, omit_defaults=True):
    """The history of a program: a `state` that the router has saved, and the `transcript` since. Only the latter is
    sent.

    The client numbers its states within a `scope`, a name that must not be guessable; state 0 is the empty history. For
    an unknown state the router answers with Error 410, field `prompt.state`; the client then sends the whole history,
    from state 0. `save`: the number under which the router saves the history with the generated answer (0: not at all);
    that is done before the last reply, and only if the request succeeds. It replaces an earlier state of that number.
    `replaces`: `state` is not needed after that. `resumes`: this ends a Pause of `state`.
    """

    scope: Scope
    state: Number = 0
    transcript: list[Segment] = msgspec.field(default_factory=list, name="said")
    save: Number = 0
    replaces: bool = False
    resumes: bool = False
