"""The base of all APIs' requests for generation: what has the same name, or the same meaning, in each of them.

body --msgspec--> GenerationRequest of its API --sampling, prompts, tool_use, constraint--> messages
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec

from radixrt.formats.structured import Constraint
from radixrt.formats.tools import NO_TOOLS, ToolUse
from radixrt.frontend.generate.defaults import Defaults
from radixrt.frontend.generate.kv_hints import KvHints
from radixrt.frontend.generate.logprobs import Wanted
from radixrt.frontend.http.errors import one_of, refuse
from radixrt.messages import Name, Priority, Prompt, Sampling
from radixrt.requests.validate import MAX_BIASES

Int = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
Seed = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""An int64, as messages have it: JSON numbers may be larger."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""The values of reasoning_effort."""
VERBOSITIES = ("low", "medium", "high")


class Reported(NamedTuple):
    """What is reported beside the text of answers; by default reasoning, in its own field, and usage."""

    reasoning: bool = True
    echo: bool = False
    """Whether the prompt is, before each answer."""
    token_ids: bool = False
    names_ids: bool = False
    """Whether log-probabilities name tokens by their ids, as token_id:5."""
    usage: bool = True
    """Whether a stream ends with the usage."""
    running_usage: bool = False
    """Whether each chunk of a stream has the usage so far."""
    logprobs: Wanted | None = None
    """Which log-probabilities are, if those of the prompt are: else Sampling has all that is wanted."""


class GenerationRequest(msgspec.Struct, kw_only=True):
    """A request of any API; None counts as absent. Fields that the API does not have are named as in vLLM and SGLang.

    An API's class adds fields, gives those of this class its own names by `msgspec.field(name=...)`, and has its own
    versions of the first methods. They raise ApiError (400) that names an invalid or unsupported field.
    """

    model: Name | None = None
    stream: bool | None = None
    cache_salt: Name | None = None
    """Narrows the namespace that the key gives."""
    priority: Priority | None = None
    kv_hints: KvHints | None = None
    """What is to become of its tokens in the cache when it has ended."""
    template_args: dict[str, Any] | None = msgspec.field(default=None, name="chat_template_kwargs")
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    seed: Seed | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[Int] | None = None
    bad_words: list[str] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    include_stop: bool | None = msgspec.field(default=None, name="include_stop_str_in_output")
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None

    unserved: ClassVar[tuple[str, ...]] = ()
    """Fields that would change an answer, and must not be ignored."""
    own_names: ClassVar[dict[str, str]] = {}
    """The API's names of other fields of messages."""

    # ------------------------------------------------------------ each API has its own

    def prompts(self, use: ToolUse) -> list[Prompt]:
        """The prompts; a chat's template gets the tools of `use`."""
        raise NotImplementedError

    def tool_use(self) -> ToolUse:
        """Which tools an answer may or must call."""
        return NO_TOOLS

    def constraint(self) -> Constraint | None:
        """The constraint on the text of an answer, if any."""
        return None

    def choices(self) -> int:
        """The number of choices for each prompt."""
        return 1

    def most_prompt_tokens(self) -> int | None:
        """The number of tokens that each prompt is truncated to, from the left, if it has more; None: not at all."""
        return None

    def token_limit(self) -> int | None:
        """The most tokens of an answer; None: as many as there is room for."""
        if self.max_tokens is not None and self.max_tokens < 1:
            refuse(self.names().get("max_tokens", "max_tokens"), "must be at least 1")
        return self.max_tokens

    def num_logprobs(self) -> int | None:
        """The number of alternatives that are computed for each token; None: no log-probabilities."""
        return None

    def reported(self) -> Reported:
        """What is reported beside the text of answers."""
        return Reported()

    # ------------------------------------------------------------ all share

    def names(self) -> dict[str, str]:
        """Maps the fields of messages to the caller's names."""
        return _names(type(self))

    def check_served(self) -> None:
        """Raise ApiError (400) for unsupported fields. Some clients send them with empty values."""
        values = _getter(self.unserved)(self)
        if values.count(None) == len(values):  # the usual case
            return
        for name, value in zip(self.unserved, values, strict=True):
            if value is not None and value is not False and value not in ("", []):
                refuse(name, "is not served")

    def sampling(self, defaults: Defaults) -> Sampling:
        """The sampling parameters; `defaults` for those that the request does not set."""
        self.check_served()
        fields: dict[str, Any] = {**defaults, "max_tokens": self.token_limit(), "logprobs": self.num_logprobs()}
        for name, value in zip(_PLAIN, _plain(self), strict=True):
            if value is not None:
                fields[name] = value
        if self.stop is not None:
            fields["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.stop_token_ids:
            fields["stop_token_ids"] = tuple(self.stop_token_ids)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                refuse("allowed_token_ids", "must not be empty")  # as in vLLM: messages would take it for all ids
            fields["allowed_token_ids"] = tuple(self.allowed_token_ids)
        if self.logit_bias:
            if len(self.logit_bias) > MAX_BIASES:
                refuse("logit_bias", f"may have {MAX_BIASES} entries at most")
            try:
                fields["logit_bias"] = {int(token): value for token, value in self.logit_bias.items()}
            except ValueError:
                refuse("logit_bias", "keys must be token ids")
        return Sampling(**fields)


_CONVERTED = {"max_tokens", "logprobs", "stop", "stop_token_ids", "allowed_token_ids", "logit_bias"}
_PLAIN = tuple(
    name
    for name in Sampling.__struct_fields__
    if name in GenerationRequest.__struct_fields__ and name not in _CONVERTED
)
"""Fields that are the same in Sampling."""
_plain = operator.attrgetter(*_PLAIN)


@functools.cache
def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """Gets the values of fields, in a tuple however many they are."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda body: tuple(getattr(body, name) for name in names)


@functools.cache
def _names(kind: type[GenerationRequest]) -> dict[str, str]:
    pairs = zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True)
    renamed = {field: name for field, name in pairs if field != name}
    return renamed | {"bad_token_ids": "bad_words"} | kind.own_names


# ---------------------------------------------------------------- arguments of chat templates


def check_verbosity(value: Any, field: str) -> None:
    """Raise ApiError (400) unless `value` is one of OpenAI's. It is otherwise ignored: only some models are trained on
    it."""
    if value is not None:
        one_of(value, VERBOSITIES, field)


def effort_args(effort: Any, field: str) -> dict[str, Any]:
    """The chat template's arguments for the reasoning effort; {} if the request does not set it."""
    if effort is None:
        return {}
    one_of(effort, EFFORTS, field)
    return thinking_args(effort != "none") | {"reasoning_effort": effort}


def thinking_args(thinks: bool) -> dict[str, Any]:
    """The chat template's arguments that turn thinking on or off: those of Qwen's and GLM's, and of DeepSeek's, Kimi's
    and Granite's. A template ignores the other's."""
    return {"enable_thinking": thinks, "thinking": thinks}
