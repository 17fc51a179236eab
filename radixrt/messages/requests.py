"""From clients to the router."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from radixrt.messages.prompts import Prompt, StatePrompt, TextPrompt, TokenPrompt
from radixrt.messages.shared import Number, Origin, Sampling, Scope, SessionFacts


class Generate(msgspec.Struct, tag="generate", kw_only=True, omit_defaults=True):
    """Generate `n` continuations. `id` is the client's own; replies carry it and a choice index.

    `text=False` leaves stop strings and text to the client (front ends that detokenize
    themselves). `stream=False` sends one Delta a choice, when it is finished.
    `cache_salt` narrows the namespace that the API key gives. `pin`: (tokens, seconds), prefixes of the prompt that
    the cache is to keep for that long after the answer, if it can. `session` is for the report. `prompt_logprobs`: the
    prompt's own tokens are reported as `sampling.logprobs` says, and so the prompt is computed as a whole.
    """

    id: int
    prompt: Prompt | StatePrompt
    sampling: Sampling = Sampling()
    model: str = ""
    n: int = 1
    stream: bool = True
    text: bool = True
    origin: Origin = Origin()
    api_key: str = ""
    cache_salt: str = ""
    pin: list[tuple[int, float]] = []
    session: SessionFacts = SessionFacts()
    prompt_logprobs: bool = False


class Score(msgspec.Struct, tag="score", kw_only=True, omit_defaults=True):
    """Log-probability of each continuation of one prompt, in one round trip; no token is drawn."""

    id: int
    prompt: Prompt | StatePrompt
    choices: list[TextPrompt | TokenPrompt]
    model: str = ""
    origin: Origin = Origin()
    api_key: str = ""
    cache_salt: str = ""


class Cancel(msgspec.Struct, tag="cancel", omit_defaults=True):
    """Stop request `id`; what it computed stays cached. No reply follows, but where one choice of a Generate is named,
    if it has not ended: then its last Delta, with `finish="stop"` and the usage. Of what it generated the first
    `tokens` are the answer, by the client's word, and counted."""

    id: int
    index: int | None = None
    tokens: int | None = None


class Tokenize(msgspec.Struct, tag="tokenize", kw_only=True):
    """`render_only` asks for the text that the template makes of a chat, without the ids, which cost far more."""

    id: int
    prompt: Prompt
    render_only: bool = False
    api_key: str = ""


class Detokenize(msgspec.Struct, tag="detokenize", kw_only=True):
    id: int
    ids: bytes
    api_key: str = ""


class Ask(msgspec.Struct, tag="ask", kw_only=True):
    """Ask the router about itself: `health`, `models`, `report` or `metrics`."""

    id: int
    what: Literal["health", "models", "report", "metrics"]
    api_key: str = ""


class Fork(msgspec.Struct, tag="fork", kw_only=True, omit_defaults=True):
    """Keep what was said up to now under `prompt.save`; `count` branches go on from there, at once. Their first
    requests are admitted together: for a moment from now they count as if all had come with the first of them."""

    id: int
    prompt: StatePrompt
    count: Annotated[int, msgspec.Meta(ge=1)]
    api_key: str = ""


class Pause(msgspec.Struct, tag="pause", kw_only=True, omit_defaults=True):
    """Nothing will be asked of a state for a while: its tokens stay cached until a request `resumes` it, if there is
    room, and for so many seconds at most (and for the router's `pause_seconds`)."""

    id: int
    scope: Scope
    state: Number
    seconds: float | None = None
    api_key: str = ""


class Forget(msgspec.Struct, tag="forget", kw_only=True, omit_defaults=True):
    """No state of a scope is needed any more."""

    id: int
    scope: Scope
    api_key: str = ""


class Share(msgspec.Struct, tag="share", kw_only=True):
    """From a front end: (key, value) of what all front ends may Recall with the same API key's tenant, while there is
    room; None: forget it."""

    id: int
    entries: list[tuple[bytes, bytes | None]]
    api_key: str = ""


class Recall(msgspec.Struct, tag="recall", kw_only=True):
    """From a front end: the answer is an Info whose data are the values of these keys, None for unknown ones."""

    id: int
    keys: list[bytes]
    api_key: str = ""


ClientRequest = Generate | Score | Cancel | Tokenize | Detokenize | Ask | Fork | Pause | Forget | Share | Recall
