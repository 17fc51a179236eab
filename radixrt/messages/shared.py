"""Types that messages in several directions use."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec

TOKEN_BYTES = 4
"""Size of a token id in a message: little-endian int32."""

FinishReason = Literal["stop", "length", "abort", "error"]
GrammarKind = Literal["json", "json_schema", "regex", "ebnf", "structural_tag"]


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """A constraint on generated text: any JSON; JSON that matches a schema (`text`: the schema, as JSON); a regular
    expression; a grammar in EBNF; or free text with parts that match schemas (`text`: a structural tag of xgrammar, as
    JSON)."""

    kind: GrammarKind
    text: str = ""

    @property
    def holds_schemas(self) -> bool:
        """Whether `text` is JSON that is a schema, or contains schemas."""
        return self.kind in ("json_schema", "structural_tag")


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling parameters, passed unchanged from the client to the sampler.

    seed         None: the router chooses one, so that a request that moves to another worker continues with the same
                 random numbers (they depend on seed and position only)
    min_tokens   stop token ids and EOS are not sampled before this many tokens
    allowed_token_ids  only these are sampled; empty: all
    bad_token_ids      sequences that are not generated: of each, the last id is not sampled after the others
    temperature  0: the most likely token; so does a top_p of 0
    logprobs     number of alternatives reported for each token (0: only the chosen token, None: nothing)
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    grammar: Grammar | None = None


Name = Annotated[str, msgspec.Meta(max_length=1024)]
"""Of a model, or a salt: they become part of a namespace, which is kept and sent many times."""
Label = Annotated[str, msgspec.Meta(max_length=1 << 16)]


class Origin(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a request comes from, for the report: the program, the path of its branch, and the number of forks in that
    path. `traceparent`: the caller's span (W3C Trace Context), for traces."""

    program: Label = ""
    branch: Label = ""
    depth: int = 0
    traceparent: Annotated[str, msgspec.Meta(max_length=128)] = ""


Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Priority = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
"""As in vLLM, lower comes earlier: a request waits while others of its tenant with lower values do. 0 by default; among
equals, and between tenants, it has no effect."""
Scope = Annotated[str, msgspec.Meta(min_length=16, max_length=64)]


CacheVerb = Literal["pin", "retain", "demote", "prefetch", "share", "delete"]
"""What a client asks of the cache. They are hints: what requests give does not depend on them.

pin       protect from eviction until its time is over, or running requests need its pages
retain    evict after all that is not retained, and after what has a lower priority
demote    move to the tier below now
prefetch  move to the device now
share     let another worker have it, without computing it
delete    remove all that a tenant has
"""
CacheResult = Literal["done", "clipped", "deferred", "refused", "missing"]
"""done      all of it, but for the last token and what does not fill a page: these are never cached
clipped   less than that: more is not cached, or a bound does not allow it
deferred  it will be done
refused   nothing was done, because of a bound, or because it cannot be done here
missing   nothing of it is cached
"""


class CacheAction(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is to become of the tokens [token_start, token_end) of a path (None: to its end), and with them of what
    comes before. `priority`: of `retain`, as in TensorRT-LLM the highest goes last. `seconds`: of `pin` and
    `retain` (None: as long as the server allows). `destination`: the worker that `share` and `prefetch` are for
    ("": `prefetch` is for the worker that holds most)."""

    verb: CacheVerb
    token_start: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    token_end: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=0, le=100)] = 50
    seconds: float | None = None
    destination: Annotated[str, msgspec.Meta(max_length=1024)] = ""


class ErrorReason(StrEnum):
    """What is wrong with a request, where clients do something about it. The values are codes of OpenAI's API."""

    CONTEXT_LENGTH = "context_length_exceeded"


class DropReason(StrEnum):
    """Why the ids of an answer that was generated here could not be used."""

    THINKING = "thinking"
    """The template drops its thinking."""
    OPENING = "opening"
    """The template drops the opening before it."""
    REWRITTEN = "rewritten"
    """The template renders it differently."""
    NOT_FOUND = "not_found"
    """It is not found in the rendered text."""


class SessionFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counts of the answers in a chat prompt that were generated here."""

    kept: Count = 0
    """Encoded by the token ids with which they were generated."""
    respelled: Count = 0
    """Of these, answers that the chat template renders differently."""
    dropped: dict[DropReason, Count] = {}
    """Answers whose generated ids could not be used, by reason."""


class TokenLogprob(msgspec.Struct, array_like=True):
    """One token's natural log-probability; `top` holds (token id, logprob), most likely first."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = []


class Usage(msgspec.Struct, frozen=True, omit_defaults=False):
    """Tokens of one request. `cached_tokens` are prompt tokens whose KV was reused (hits). `explain`: why the others
    were not, of the first choice, if that was asked for. `max_tokens`: for how many tokens there was room, if more were
    asked for."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    worker: str = ""
    explain: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    max_tokens: int | msgspec.UnsetType = msgspec.UNSET
