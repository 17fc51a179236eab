"""The nodes that a program appends to a branch. Immutable; text is a plain string."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack, cast

import msgspec

from radixrt.lang.functions import ToolLike, described_tools
from radixrt.lang.misuse import unknown_fields
from radixrt.lang.schema import grammar_of
from radixrt.lang.values import kind_of
from radixrt.messages import Grammar, Sampling


@dataclass(frozen=True, slots=True)
class Gen:
    """Generated text, known as `name`. With `stream`, `Branch.stream(name)` yields it as it arrives. `schema` is the
    one that it has to follow, as the program gave it. `tools` are those of the chat from here on, in OpenAI's format;
    None: those that it has."""

    name: str
    sampling: Sampling
    stream: bool = False
    schema: Any = None
    tools: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A message with the result of a call."""

    content: str
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class Select:
    """The most likely of `choices`, known as `name`: by the mean log-probability of its tokens, or with `per_token`
    False by their sum."""

    name: str
    choices: tuple[str, ...]
    per_token: bool = True


@dataclass(frozen=True, slots=True)
class Role:
    """A message of a chat."""

    role: str
    parts: tuple[str | Gen | Select, ...]


Node = str | Gen | Select | Role | Result


OWN = ("regex", "schema", "stream", "tools")
"""What a gen has beside the fields of Sampling."""


class Fields(TypedDict, total=False):
    """The fields of Sampling, as `gen` takes them."""

    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    logit_bias: dict[int, float]
    allowed_token_ids: tuple[int, ...]
    bad_token_ids: tuple[tuple[int, ...], ...]
    stop: str | Iterable[str]
    stop_token_ids: int | Iterable[int]
    include_stop: bool
    ignore_eos: bool
    logprobs: int | None
    skip_special_tokens: bool
    grammar: Grammar | None


def gen(
    name: str,
    sampling: Sampling = Sampling(),
    *,
    stream: bool = False,
    regex: str | None = None,
    schema: Any = None,
    tools: Sequence[ToolLike] | None = None,
    **overrides: Unpack[Fields],
) -> Gen:
    """Generate text by `sampling`, changed by `overrides` (fields of Sampling; `stop` may be one string).

    The text can be constrained to a match of `regex`, or to JSON of `schema`: a JSON schema as a dict or as text ({}:
    any JSON), a msgspec Struct, a pydantic model or TypeAdapter, or another type that msgspec or pydantic knows;
    `Branch.parse(name)` converts it to an object. Other grammars are given as `grammar=Grammar("ebnf", ...)`.

    `tools` are functions, or dicts in OpenAI's format, that the model may call: `await s.value(name)` has the
    `tool_calls`, `content` and `reasoning` (`Branch.run_tools` makes the calls as well). The chat has them from here
    on, and `tools=[]` takes them away; as they are at the beginning of the prompt, it is computed again where they
    change. Of a function the model sees the name, the docstring and the annotated parameters.

    Raises TypeError for a field that there is not, which says what to write instead, and ValueError for regex and
    schema together."""
    if not isinstance(sampling, Sampling):
        meant = f": write max_tokens={sampling}" if isinstance(sampling, int) else ""
        raise TypeError(f"gen {name!r}: expected a Sampling, not {type(sampling).__name__}{meant}")
    if (grammar := grammar_of(name, regex, schema)) is not None:
        if "grammar" in overrides:
            raise ValueError(f"gen {name!r}: grammar cannot be followed beside regex or schema")
        overrides["grammar"] = grammar
    described = None if tools is None else described_tools(f"gen {name!r}", tools)
    return Gen(name, _changed(name, sampling, overrides), stream, schema, described)


def _changed(name: str, sampling: Sampling, overrides: Mapping[str, object]) -> Sampling:
    """`sampling` of the gen `name`, with these fields."""
    if (problem := unknown_fields(name, overrides, (*OWN, *Sampling.__struct_fields__))) is not None:
        raise problem
    fields = dict(overrides)
    for field in {"stop", "stop_token_ids"} & fields.keys():
        value = fields[field]
        fields[field] = (value,) if isinstance(value, str | int) else tuple(cast("Iterable[Any]", value))
    return msgspec.structs.replace(sampling, **fields) if fields else sampling


def select(name: str, choices: Iterable[str], *, per_token: bool = True) -> Select:
    """Choose among texts, in one round trip. A space that the text before ends with is scored with each of them, as
    words have it in texts. Raises TypeError for a single string, or a choice that is not text, and
    ValueError without choices, or if one is empty."""
    if isinstance(choices, str):
        raise TypeError(f"select {name!r}: choices are several texts, not one: write [{choices!r}, ...]")
    texts = tuple(choices)
    for choice in texts:
        if not isinstance(choice, str):
            raise TypeError(f"select {name!r}: a choice must be text, not {kind_of(choice)}")
    if not texts or not all(texts):
        raise ValueError(f"select {name!r}: choices must be texts that are not empty, at least one")
    return Select(name, texts, per_token)


def role(name: str, *parts: str | Gen | Select) -> Role:
    """A message of any role. Raises TypeError for other kinds of parts, and ValueError for gen or select in a message
    that is not the assistant's."""
    for part in parts:
        if not isinstance(part, str | Gen | Select):
            raise TypeError(f"{name}: expected text, gen or select, not {kind_of(part)}")
        if not isinstance(part, str) and name != "assistant":
            raise ValueError(f"{name}: only the assistant generates")
    return Role(name, parts)


def system(*parts: str) -> Role:
    """A system message."""
    return role("system", *parts)


def user(*parts: str) -> Role:
    """A message of the user."""
    return role("user", *parts)


def assistant(*parts: str | Gen | Select) -> Role:
    """A message of the assistant: text, gen and select, in any order."""
    return role("assistant", *parts)
