"""Validates requests of OpenAI's completions and chat APIs, and converts them to messages. Pure; every error names the
field.

Fields that OpenAI does not have are named as in vLLM and SGLang. Unknown fields are ignored, as there; a known field
that is not supported is refused.
"""

from __future__ import annotations

import functools
import operator
import re
from array import array
from typing import Annotated, Any, Protocol

import msgspec

from radixrt.frontend.formats import structured
from radixrt.frontend.formats.structured import Constraint
from radixrt.frontend.formats.tools import NO_TOOLS, ToolUse, tool_use
from radixrt.frontend.generate.defaults import Defaults
from radixrt.frontend.generate.logprobs import Wanted
from radixrt.frontend.http.errors import ApiError, refuse
from radixrt.frontend.openai.history import checked_messages
from radixrt.messages import ChatPrompt, Name, Prompt, Sampling, TextPrompt, TokenPrompt
from radixrt.requests.validate import MAX_BIASES, MAX_LOGPROBS
from radixrt.tokens import cut_ids, parse_ids

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions; a chat may use all available room."""
MAX_PROMPTS = 1024
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""The values of reasoning_effort."""
VERBOSITIES = ("low", "medium", "high")

Int = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
Seed = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""An int64, as messages have it: JSON numbers may be larger."""

UNSERVED = (
    "audio", "chat_template", "custom_logit_processor", "documents",
    "guided_whitespace_pattern", "input_ids", "logits_processors", "logprob_token_ids", "lora_path", "no_stop_trim",
    "prompt_embeds", "repetition_detection", "return_hidden_states", "return_meta_info",
    "return_prompt_text", "return_prompt_token_ids", "return_routed_experts",
    "session_params", "stop_regex", "structural_tag", "thinking_token_budget",
    "use_beam_search", "watermarking", "web_search_options",
)  # fmt: skip
"""Unsupported fields of OpenAI, vLLM and SGLang that would change an answer: they must not be ignored."""
ALWAYS_ON = ("separate_reasoning", "stream_reasoning")
"""Fields of SGLang that are true by default, and that cannot be false here."""


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


Unserved = msgspec.defstruct(
    "Unserved",
    [(name, Any, None) for name in UNSERVED + ALWAYS_ON + structured.FIELDS if name != "response_format"],
    kw_only=True,
)


class Common(Unserved, kw_only=True):  # type: ignore[misc, valid-type]
    """Fields of both kinds of request; None counts as absent."""

    model: Name | None = None
    max_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Int | None = None
    best_of: Int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: Seed | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[Int] | None = None
    bad_words: list[str] | None = None
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Log-probabilities name tokens by their ids, as token_id:5."""
    prompt_logprobs: Int | None = None
    truncate_prompt_tokens: Int | None = None
    """Only so many of the last tokens of a prompt are used."""
    cache_salt: Name | None = None
    response_format: dict[str, Any] | None = None
    user: str | None = None

    def choices(self) -> int:
        """The number of choices for each prompt."""
        n = 1 if self.n is None else self.n
        if self.best_of not in (None, n):
            refuse("best_of", "only best_of equal to n is served")
        return n

    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        if self.stream_options is None:
            return False
        if not self.stream:
            refuse("stream_options", "only with stream")
        return bool(self.stream_options.include_usage)

    def counts_tokens(self) -> bool:
        """Whether each chunk of a stream has the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def output_logprobs(self) -> int | None:
        """The number of alternatives that are reported for each token of an answer; None: no log-probabilities."""
        raise NotImplementedError

    def wanted_logprobs(self) -> Wanted | None:
        """Which log-probabilities are reported, if those of the prompt are: else Sampling has all that is wanted."""
        return None if self.prompt_logprobs is None else Wanted(self.output_logprobs(), self.prompt_logprobs)

    def names(self) -> dict[str, str]:
        """Maps the fields of messages to the caller's names."""
        return {"include_stop": "include_stop_str_in_output", "bad_token_ids": "bad_words"}

    def tool_use(self) -> ToolUse:
        """Which tools an answer may or must call."""
        return NO_TOOLS

    def constraint(self) -> Constraint | None:
        """The constraint on the text of an answer, if any."""
        values = _structured(self)
        if values == _UNCONSTRAINED:
            return None
        return structured.constraint(dict(zip(structured.FIELDS, values, strict=True)))

    def base_sampling(self, defaults: Defaults, max_tokens: int | None) -> Sampling:
        if (unserved := _unserved(self)) != _NOTHING:
            for name, value in zip(UNSERVED, unserved, strict=True):
                if value is not None and value is not False and value not in ("", []):  # some clients send empty values
                    refuse(name, "is not served")
        if False in (switches := _switches(self)):
            refuse(ALWAYS_ON[switches.index(False)], "false is not served")
        fields: dict[str, Any] = {**defaults, "max_tokens": max_tokens, "logprobs": self._most_logprobs()}
        for name, value in zip(_SAMPLING, _plain(self), strict=True):
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

    def _most_logprobs(self) -> int | None:
        """The number of alternatives that are computed, for tokens of the prompt and of the answer alike."""
        wanted, of_prompt = self.output_logprobs(), self.prompt_logprobs
        if of_prompt is None or (wanted is not None and wanted < 0):  # the latter is refused with the others
            return wanted
        if self.stream:
            refuse("prompt_logprobs", "not with stream")
        if not 0 <= of_prompt <= MAX_LOGPROBS:
            refuse("prompt_logprobs", f"must be in [0, {MAX_LOGPROBS}]")
        return max(of_prompt, wanted or 0)


_PLAIN = (
    "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "top_k", "min_p", "repetition_penalty",
    "min_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
)  # fmt: skip
_SAMPLING = [{"include_stop_str_in_output": "include_stop"}.get(name, name) for name in _PLAIN]
"""The names of these fields in Sampling."""
_plain, _unserved = operator.attrgetter(*_PLAIN), operator.attrgetter(*UNSERVED)
_switches = operator.attrgetter(*ALWAYS_ON)
_structured = operator.attrgetter(*structured.FIELDS)
_UNCONSTRAINED, _NOTHING = (None,) * len(structured.FIELDS), (None,) * len(UNSERVED)


class Completion(Common, kw_only=True):
    """POST /v1/completions."""

    prompt: msgspec.Raw = msgspec.Raw(b"null")
    """A TokenPrompt if `cut_prompt` has read it already."""
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Int | None = None

    def prompts(self, use: ToolUse = NO_TOOLS) -> list[Prompt]:
        """The prompts: `prompt` may be a text, a list of texts, token ids, or a list of lists of token ids."""
        if isinstance(self.prompt, TokenPrompt):
            return [self.prompt]
        if (ids := parse_ids(self.prompt)) is not None:
            return [TokenPrompt(ids)]
        special = self.add_special_tokens is not False
        match parse(_prompt, self.prompt, "prompt"):
            case None:
                refuse("prompt", "is missing")
            case str() as text:
                return [TextPrompt(text, special)]
            case []:
                refuse("prompt", "is empty: at least one is needed")
            case [int(), *_] as ids:
                return [_ids(ids, "prompt")]
            case [*many] if len(many) > MAX_PROMPTS:
                refuse("prompt", f"at most {MAX_PROMPTS} prompts")
            case [str(), *_] as texts if all(isinstance(text, str) for text in texts):
                return [TextPrompt(text, special) for text in texts]
            case [list(), *_] as lists if all(isinstance(ids, list) for ids in lists):
                return [_ids(ids, f"prompt[{i}]") for i, ids in enumerate(lists)]
        refuse("prompt", "expected text, a list of texts, token ids, or a list of lists of token ids")

    def sampling(self, defaults: Defaults) -> Sampling:
        """The sampling parameters; `defaults` for those that the request does not set."""
        if self.suffix:
            refuse("suffix", "is not served")
        max_tokens = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return self.base_sampling(defaults, max_tokens)

    def output_logprobs(self) -> int | None:
        """See Common."""
        return self.logprobs


class Chat(Common, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    """A routing hint, which is ignored: requests are placed by their tokens."""
    service_tier: str | None = None
    reasoning_effort: str | None = None
    reasoning: dict[str, Any] | None = None
    """As in SGLang: an object with `effort`, which is reasoning_effort, and `enabled`."""
    verbosity: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    echo: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    """As in vLLM: false leaves the reasoning out of the answer."""

    def prompts(self, use: ToolUse = NO_TOOLS) -> list[Prompt]:
        """The chat; its template gets the tools of `use`."""
        if self.functions:
            refuse("functions", "is not served; use tools")
        if self.echo:
            refuse("echo", "is not served in a chat")
        if self.modalities not in (None, [], ["text"]):
            refuse("modalities", "only text is served")
        if self.function_call not in (None, "none", "auto"):
            refuse("function_call", "is not served; use tool_choice")
        if self.add_special_tokens:
            refuse("add_special_tokens", "is not served in a chat: its template has them")
        check_verbosity(self.verbosity, "verbosity")
        return [chat_prompt(self, self.messages, use.shown, self._thinking())]

    def _thinking(self) -> dict[str, Any]:
        """The chat template's arguments for `reasoning_effort` and `reasoning`."""
        asked = self.reasoning or {}
        enabled, effort = asked.get("enabled"), asked.get("effort")
        if not isinstance(enabled, bool | None):
            refuse("reasoning.enabled", "must be true or false")
        if effort is not None and self.reasoning_effort not in (None, effort):
            refuse("reasoning.effort", "is reasoning_effort by another name: only one of them can be followed")
        told = {} if enabled is None else thinking_args(enabled)
        field = "reasoning_effort" if effort is None else "reasoning.effort"
        return told | effort_args(self.reasoning_effort if effort is None else effort, field)

    def tool_use(self) -> ToolUse:
        """See Common."""
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    def names(self) -> dict[str, str]:
        """See Common."""
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        own = {"prompt": "messages", "template_args": "chat_template_kwargs", "logprobs": "top_logprobs"}
        return super().names() | own | {"max_tokens": limit}

    def sampling(self, defaults: Defaults) -> Sampling:
        """See Completion."""
        if self.top_logprobs and not self.logprobs:
            refuse("top_logprobs", "only with logprobs")
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.base_sampling(defaults, limit)

    def output_logprobs(self) -> int | None:
        """See Common."""
        return (self.top_logprobs or 0) if self.logprobs else None


def check_verbosity(value: Any, field: str) -> None:
    """Raise ApiError (400) unless `value` is one of OpenAI's. It is otherwise ignored: only some models are trained on
    it."""
    if value not in (None, *VERBOSITIES):
        refuse(field, f"must be one of {', '.join(VERBOSITIES)}, not {value!r}")


def effort_args(effort: Any, field: str) -> dict[str, Any]:
    """The chat template's arguments for the reasoning effort; {} if the request does not set it."""
    if effort is None:
        return {}
    if effort not in EFFORTS:
        refuse(field, f"must be one of {', '.join(EFFORTS)}, not {effort!r}")
    return thinking_args(effort != "none") | {"reasoning_effort": effort}


def thinking_args(thinks: bool) -> dict[str, Any]:
    """The chat template's arguments that turn thinking on or off: those of Qwen's and GLM's, and of DeepSeek's, Kimi's
    and Granite's. A template ignores the other's."""
    return {"enable_thinking": thinks, "thinking": thinks}


class ChatBody(Protocol):
    """A body with a chat for a template."""

    continue_final_message: bool | None
    add_generation_prompt: bool | None
    chat_template_kwargs: dict[str, Any] | None


def chat_prompt(
    body: ChatBody,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    effort: dict[str, Any] | None = None,
) -> ChatPrompt:
    """The chat of a body, which ends with the beginning of an answer, or continues the last message."""
    partial = bool(body.continue_final_message)
    if body.add_generation_prompt is not None and body.add_generation_prompt == partial:
        refuse("add_generation_prompt", "must be the opposite of continue_final_message")
    return ChatPrompt(checked_messages(messages), tools, partial, (effort or {}) | (body.chat_template_kwargs or {}))


_prompt = msgspec.json.Decoder(str | list[str | Int | list[Int]] | None)


def _ids(ids: list[Any], field: str) -> TokenPrompt:
    try:
        return TokenPrompt(array("i", ids).tobytes())
    except TypeError:
        refuse(field, "token ids must be integers")


_completion = msgspec.json.Decoder(Completion)


def cut_prompt(body: bytes) -> tuple[bytes, bytes | None]:
    """Take the token ids of a prompt, which are most of a body, out of a body of /v1/completions without parsing them.
    Returns (the rest, the ids; None if the prompt is of another kind)."""
    return cut_ids(body, "prompt") or (body, None)


def parse_completion(rest: bytes, ids: bytes | None) -> Completion:
    """Parse what `cut_prompt` returns."""
    found = parse(_completion, rest)
    if ids is not None:
        found.prompt = TokenPrompt(ids)
    return found


@functools.cache
def _lenient(kind: Any) -> msgspec.json.Decoder:
    return msgspec.json.Decoder(kind, strict=False)


def parse(decoder: msgspec.json.Decoder, body: bytes | msgspec.Raw, within: str = "") -> Any:
    """Decode a body, or the part of one in the field `within`. Raises ApiError (400) that names an invalid field.

    Numbers and booleans may be in other types with the same value, as clients that compute them send 4096.0, and as
    vLLM and SGLang take them."""
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError:
            return _lenient(decoder.type).decode(body)
    except msgspec.ValidationError as problem:
        text = str(problem)
        path = re.search(r" - at `\$\.?([^`]*)`$", text)
        missing = re.search(r"required field `([^`]*)`", text)
        field = within + ((missing or path)[1] if missing or path else "")
        raise ApiError(400, text, re.sub(r"\[\.\.\.\].*", "", field)) from None
    except msgspec.DecodeError as problem:
        raise ApiError(400, f"the body is not JSON: {problem}", within) from None
    except UnicodeDecodeError as problem:
        raise ApiError(400, f"the body is not UTF-8: {problem}", within) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", within) from None
