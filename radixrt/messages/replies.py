"""From the router to clients."""

from __future__ import annotations

from typing import Any

import msgspec

from radixrt.messages.shared import FinishReason, TokenLogprob, Usage


class Delta(msgspec.Struct, array_like=True):
    """What one choice of one request gained. `finish` and `usage` come with the last one."""

    id: int
    index: int = 0
    ids: bytes = b""
    text: str = ""
    finish: FinishReason | None = None
    usage: Usage | None = None
    logprobs: list[TokenLogprob] | None = None
    stop: str | int | None = None
    """The stop string or token id that ended it."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """With the first one, where they were asked for: of the prompt's tokens from the second on."""


class Deltas(msgspec.Struct, tag="deltas"):
    """All that one step gave one client: a message a step, not a message a token."""

    items: list[Delta]


class Scored(msgspec.Struct, tag="scored"):
    """For each choice the log-probability of each of its tokens, and the usage summed over choices."""

    id: int
    logprobs: list[list[float]]
    usage: Usage


class Tokens(msgspec.Struct, tag="tokens"):
    """`ids` of a Tokenize, with the `text` that the template made of a chat; `text` of a Detokenize."""

    id: int
    ids: bytes = b""
    text: str = ""


class Info(msgspec.Struct, tag="info"):
    """The answer to Ask: a JSON-like value, for `metrics` Prometheus text. To Recall: values."""

    id: int
    data: Any


class Error(msgspec.Struct, tag="error"):
    """`code` is an HTTP status; `field` names what is wrong in the request; `id` None if unknown."""

    id: int | None
    code: int
    message: str
    field: str = ""
    retry_after: float | None = None
    """Seconds, with 429 and 503."""


class Done(msgspec.Struct, tag="done"):
    """The answer to Fork, Pause, Forget and Share."""

    id: int


ClientReply = Deltas | Scored | Tokens | Info | Error | Done
