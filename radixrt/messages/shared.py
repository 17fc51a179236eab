"""What messages of all edges are made of."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

TOKEN_BYTES = 4
"""Of a token id as it travels: little-endian int32."""

FinishReason = Literal["stop", "length", "abort", "error"]
GrammarKind = Literal["json", "json_schema", "regex", "ebnf", "structural_tag"]


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a generated text must be: JSON of any kind, JSON by a schema (`text`: the schema as JSON), a match of a
    regular expression or of a grammar in EBNF, or free text with parts by schema (`text`: a structural tag of xgrammar
    as JSON)."""

    kind: GrammarKind
    text: str = ""

    @property
    def holds_schemas(self) -> bool:
        """Its text is JSON, a schema or with schemas in it."""
        return self.kind in ("json_schema", "structural_tag")


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to choose tokens. One object, passed whole from the client to the sampler.

    `seed=None` lets the router draw one, so that a request that moves to another worker goes on
    with the same random numbers: noise depends on (seed, position) alone.
    `min_tokens` bans stop ids and eos until that many tokens were generated.
    A temperature of 0, and a top_p of 0, choose the likeliest token.
    `logprobs` is the number of alternatives reported a token; 0 reports the chosen one only,
    None reports nothing.
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
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    grammar: Grammar | None = None


class Origin(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a request comes from, for the report: the program, the fork path, its depth in forks."""

    program: str = ""
    branch: str = ""
    depth: int = 0


Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Scope = Annotated[str, msgspec.Meta(min_length=16, max_length=64)]
DropReason = Literal["thinking", "opening", "rewritten", "not_found"]


class SessionFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answers in a chat that were generated here: how many are spelled by their ids, how many of these the template
    writes in other words, and how many lost ids, by why: the template drops their thinking, or the opening before
    them, or writes them differently, or they are not found in what it writes."""

    kept: Count = 0
    respelled: Count = 0
    dropped: dict[DropReason, Count] = {}


class TokenLogprob(msgspec.Struct, array_like=True):
    """One token's natural log-probability; `top` holds (token id, logprob), most likely first."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = []


class Usage(msgspec.Struct, frozen=True, omit_defaults=False):
    """Tokens of one request. `cached_tokens` are prompt tokens whose KV was reused (hits)."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    worker: str = ""


def tenant_of(namespace: str) -> str:
    """Whose a namespace is: its first line."""
    return namespace.partition("\n")[0]
