"""What a request goes on from: text, token ids, a chat, or what a program has said."""

from __future__ import annotations

from typing import Any

import msgspec

from radixrt.messages.shared import Count, Number, Sampling, Scope

GONE = 410
"""Code of the Error for a state that the router does not know (any more)."""


class TextPrompt(msgspec.Struct, tag="text", frozen=True):
    text: str
    add_special_tokens: bool = True


class TokenPrompt(msgspec.Struct, tag="ids", frozen=True):
    ids: bytes


class ChatPrompt(msgspec.Struct, tag="chat", frozen=True):
    """Messages as OpenAI writes them. `partial` continues the last (assistant) message."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    partial: bool = False
    template_args: dict[str, Any] = {}


class PartsPrompt(msgspec.Struct, tag="parts", frozen=True):
    """Parts encoded one by one and concatenated, so that a generated part keeps its exact ids."""

    parts: list[TextPrompt | TokenPrompt]


Prompt = TextPrompt | TokenPrompt | ChatPrompt | PartsPrompt


class SaidText(msgspec.Struct, tag="text", frozen=True, array_like=True):
    """Text of the assistant's open message, or of a history without roles."""

    text: str


class SaidMessage(msgspec.Struct, tag="message", frozen=True, array_like=True):
    """A whole message of a chat."""

    role: str
    content: str


class TurnBegins(msgspec.Struct, tag="begins", frozen=True, array_like=True):
    """The assistant begins to speak: its message is open."""


class TurnEnds(msgspec.Struct, tag="ends", frozen=True, array_like=True):
    """Its message is complete."""


class SaidChoice(msgspec.Struct, tag="choice", frozen=True, array_like=True):
    """One of a Score's choices was taken: it stays encoded by itself, as it was scored."""

    text: str


class SaidAnswer(msgspec.Struct, tag="answer", frozen=True, array_like=True):
    """What was generated: all of its ids, and the text and stop that its Deltas had."""

    ids: bytes
    text: str
    stop: str | Count | None
    sampling: Sampling


Said = SaidText | SaidMessage | TurnBegins | TurnEnds | SaidChoice | SaidAnswer


class StatePrompt(msgspec.Struct, tag="state", frozen=True, omit_defaults=True):
    """What was said up to a state that the router keeps, and since. Nothing that is in the state is sent again.

    States are numbered by the client within a `scope`, a name that nobody guesses; 0 is the state in which nothing was
    said. An unknown state is answered with Error 410, field `prompt.state`: begin again from 0, with everything. With
    `save` the router keeps what was said and generated under that number, before it sends the last answer, if the
    request ends well; what had the number before is replaced. `replaces`: `state` is then not needed any more.
    `resumes`: a Pause of `state` is over.
    """

    scope: Scope
    state: Number = 0
    said: list[Said] = []
    save: Number = 0
    replaces: bool = False
    resumes: bool = False
