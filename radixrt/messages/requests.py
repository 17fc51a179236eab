"""From clients to the router."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from radixrt.messages.prompts import Prompt, StatePrompt, TextPrompt, TokenPrompt
from radixrt.messages.shared import CacheAction, Count, Name, Number, Origin, Priority, Sampling, Scope, SessionFacts


class Generate(msgspec.Struct, tag="generate", kw_only=True, omit_defaults=True):
    """Generate `n` continuations. `id` is chosen by the client; replies have it, and the index of a choice.

    text             False: no detokenization, no search for stop strings, and answers to chats are not parsed (for
                     front ends, which do it themselves)
    stream           False: one Delta for each choice, when it is finished
    cache_salt       a further part of the namespace, within the tenant of the API key
    pin              (tokens, seconds): that prefix of the prompt stays cached for so long after the answer, if possible
    cache            what is to become of its tokens, those of the first choice's answer included, when it has ended:
                     `pin`, `retain` or `demote`
    session          counts for the report
    prompt_logprobs  also report the prompt's tokens, as `sampling.logprobs` says; the prompt is then computed without
                     cache hits
    explain          the last Delta of the first choice says why its prompt missed the cache
    """

    id: int
    prompt: Prompt | StatePrompt
    sampling: Sampling = Sampling()
    model: Name = ""
    n: int = 1
    stream: bool = True
    text: bool = True
    origin: Origin = Origin()
    api_key: str = ""
    cache_salt: Name = ""
    priority: Priority = 0
    pin: list[tuple[int, float]] = []
    cache: Annotated[list[CacheAction], msgspec.Meta(max_length=8)] = []
    session: SessionFacts = SessionFacts()
    prompt_logprobs: bool = False
    explain: bool = False


class Score(msgspec.Struct, tag="score", kw_only=True, omit_defaults=True):
    """Compute the log-probability of each of `choices` as a continuation of one prompt. Nothing is sampled."""

    id: int
    prompt: Prompt | StatePrompt
    choices: list[TextPrompt | TokenPrompt]
    model: Name = ""
    origin: Origin = Origin()
    api_key: str = ""
    cache_salt: Name = ""
    priority: Priority = 0


class Cancel(msgspec.Struct, tag="cancel", omit_defaults=True):
    """Stop request `id`, or only choice `index` of a Generate; what was computed stays cached. There is no reply,
    unless `index` names an unfinished choice: then its last Delta, with `finish="stop"` and the usage. `tokens`: the
    number of generated tokens that belong to the choice's answer, and count in the usage (None: all)."""

    id: int
    index: int | None = None
    tokens: int | None = None


class CalledTool(msgspec.Struct, tag="called_tool"):
    """Choice `index` of a Generate, which has ended, calls a tool of that name. There is no reply. It is for the cache,
    which learns how long that tool takes."""

    id: int
    index: int
    name: str


class Tokenize(msgspec.Struct, tag="tokenize", kw_only=True):
    """Encode a prompt. With `render_only`, only render a chat with its template: the reply has text but no ids, and
    costs far less."""

    id: int
    prompt: Prompt
    render_only: bool = False
    api_key: str = ""


class Detokenize(msgspec.Struct, tag="detokenize", kw_only=True):
    """Decode token ids."""

    id: int
    ids: bytes
    api_key: str = ""


Query = Literal["health", "models", "model", "report", "metrics"]


class Ask(msgspec.Struct, tag="ask", kw_only=True):
    """Query the router's health, the served models, the report or the metrics; or whether `model` is served: the name
    that it is served by, or an Error as for a Generate."""

    id: int
    what: Query
    model: Name = ""
    api_key: str = ""


LivePart = Literal["state", "history", "request", "tree", "text"]


class Live(msgspec.Struct, tag="live", kw_only=True, omit_defaults=True):
    """Query what the live page shows: the state now, the history before, why a request that has ended missed the cache
    (`of`: its id in the state), the tree of what is cached, below its node `of` if given, in about `most` nodes at
    most, or the text of its node `of`. The reply is an Info."""

    id: int
    part: LivePart
    of: Name = ""
    most: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 2000
    api_key: str = ""


class Fork(msgspec.Struct, tag="fork", kw_only=True, omit_defaults=True):
    """Save the history as state `prompt.save`, from which `count` branches continue immediately. For a short time,
    their first requests are queued and placed as if all had arrived with the first of them."""

    id: int
    prompt: StatePrompt
    count: Annotated[int, msgspec.Meta(ge=1)]
    api_key: str = ""


class Pause(msgspec.Struct, tag="pause", kw_only=True, omit_defaults=True):
    """The program waits, for example for a tool: if there is room, the tokens of `state` stay cached until a request
    `resumes` it, for at most `seconds` and the router's `pause_seconds`."""

    id: int
    scope: Scope
    state: Number
    seconds: float | None = None
    api_key: str = ""


class Forget(msgspec.Struct, tag="forget", kw_only=True, omit_defaults=True):
    """Drop all states of a scope."""

    id: int
    scope: Scope
    api_key: str = ""


class ControlCache(msgspec.Struct, tag="cache", kw_only=True, omit_defaults=True):
    """A hint to the cache: do with the tokens of a prompt what `action` says; see CacheVerb. The prompt is text, token
    ids, a chat that is rendered by the model's template, or a program state, without anything said since. `session`,
    the scope of a program, in the place of the prompt: all its states. For `delete` there is neither: it is for all
    that the tenant of the key has, on all workers, and in the router. `tail`: so many of the last tokens need not be
    cached, as they are what a template writes after an answer.

    The reply is an Info with `result`, a CacheResult; `tokens` and `bytes`, for how many it is done; `worker`; and the
    `reason` of what is not done. What a tenant may ask for in a time is bounded: beyond that it is refused, with
    `retry_after`, before anything is encoded or looked up."""

    id: int
    action: CacheAction
    prompt: Prompt | StatePrompt | None = None
    session: Annotated[str, msgspec.Meta(max_length=64)] = ""
    tail: Count = 0
    model: Name = ""
    cache_salt: Name = ""
    api_key: str = ""


class Share(msgspec.Struct, tag="share", kw_only=True):
    """Store (key, value) entries in the router, for all front ends, separately for each tenant; None deletes a key. If
    memory runs out, entries are dropped. `used`: keys whose values were used where they are known already, so that
    others are dropped before them."""

    id: int
    entries: list[tuple[bytes, bytes | None]]
    used: list[bytes] = []
    api_key: str = ""


class Recall(msgspec.Struct, tag="recall", kw_only=True):
    """Read shared entries: the reply is an Info with the value of each key, None if unknown."""

    id: int
    keys: list[bytes]
    api_key: str = ""


class ClearCache(msgspec.Struct, tag="clear_cache", kw_only=True):
    """Empty the caches of all workers, except for what running requests and pins hold; what is sent later finds them
    empty. Where API keys are configured, refused (401, 403) for all keys but the admin's: it would be a tenant's power
    over all others."""

    id: int
    api_key: str = ""


class ChangeAdapter(msgspec.Struct, tag="change_adapter", kw_only=True, omit_defaults=True):
    """Load a LoRA adapter from the folder `path` of each worker's machine as model `name`, or unload it (`path` "").
    One that is loaded is replaced only with `in_place`. The reply is an Info with the errors of workers that could not
    load it, by name; if none could, an Error. Refused (403) unless the router allows it and, where API keys are
    configured, for all keys but the admin's. `admin_only`: even if the router has no keys; so say front ends that have
    some, as they do not know the admin's."""

    id: int
    name: str
    path: str = ""
    in_place: bool = False
    admin_only: bool = False
    api_key: str = ""


class DrainWorker(msgspec.Struct, tag="drain_worker", kw_only=True, omit_defaults=True):
    """Let a worker finish its runs, without new ones, and then end; runs that take longer than --shutdown-timeout
    continue elsewhere. With `restart` its parent starts it again. The reply is an Info, when it has left. Refused where
    API keys are configured for all keys but the admin's. `admin_only` as in ChangeAdapter."""

    id: int
    worker: str
    restart: bool = False
    admin_only: bool = False
    api_key: str = ""


ClientRequest = (
    Generate | Score | Cancel | CalledTool | Tokenize | Detokenize | Ask | Live | Fork | Pause | Forget | ControlCache
    | Share | Recall | ClearCache | ChangeAdapter | DrainWorker
)  # fmt: skip
