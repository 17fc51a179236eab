"""Validates requests of OpenAI's completions and chat APIs, and converts them to messages. Pure; every error names the
field.

Fields that OpenAI does not have are named as in vLLM and SGLang. Unknown fields are ignored, as there; a known field
that is not supported is refused.
"""

from __future__ import annotations

import operator
from array import array
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from radixrt.formats import structured
from radixrt.formats.structured import Constraint
from radixrt.formats.tools import NO_TOOLS, ToolUse, tool_use
from radixrt.frontend.generate.logprobs import Wanted
from radixrt.frontend.generate.request import (
    GenerationRequest,
    Int,
    Reported,
    check_verbosity,
    effort_args,
    thinking_args,
)
from radixrt.frontend.http.codec import parse
from radixrt.frontend.http.errors import refuse
from radixrt.frontend.openai.history import checked_messages
from radixrt.messages import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from radixrt.requests.validate import MAX_LOGPROBS
from radixrt.tokens import cut_ids, parse_ids

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions; a chat may use all available room."""
MAX_PROMPTS = 1024
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


if TYPE_CHECKING:
    _Fields = GenerationRequest
else:  # these are only looked up by name
    _Fields = msgspec.defstruct(
        "_Fields",
        [(name, Any, None) for name in UNSERVED + ALWAYS_ON + structured.FIELDS if name != "response_format"],
        bases=(GenerationRequest,),
        kw_only=True,
    )


class Common(_Fields, kw_only=True):
    """Fields of both kinds of request."""

    unserved = UNSERVED

    n: Int | None = None
    best_of: Int | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    include_reasoning: bool | None = None
    """As in vLLM: false leaves the reasoning out of the answer."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: Int | None = None
    truncate_prompt_tokens: Int | None = None
    response_format: dict[str, Any] | None = None
    user: str | None = None

    def choices(self) -> int:
        n = 1 if self.n is None else self.n
        if self.best_of not in (None, n):
            refuse("best_of", "only best_of equal to n is served")
        return n

    def check_served(self) -> None:
        super().check_served()
        if False in (switches := _switches(self)):
            refuse(ALWAYS_ON[switches.index(False)], "false is not served")

    def constraint(self) -> Constraint | None:
        values = _structured(self)
        if values == _UNCONSTRAINED:
            return None
        return structured.constraint(dict(zip(structured.FIELDS, values, strict=True)))

    def most_prompt_tokens(self) -> int | None:
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < 1:
            refuse("truncate_prompt_tokens", "must be at least 1")
        return self.truncate_prompt_tokens

    def reported(self) -> Reported:
        options, of_prompt = self.stream_options or StreamOptions(), self.prompt_logprobs
        if self.stream_options is not None and not self.stream:
            refuse("stream_options", "only with stream")
        return Reported(
            reasoning=self.include_reasoning is not False,
            echo=bool(self.echo),
            token_ids=bool(self.return_token_ids),
            names_ids=bool(self.return_tokens_as_token_ids),
            usage=bool(options.include_usage),
            running_usage=bool(options.continuous_usage_stats),
            logprobs=None if of_prompt is None else Wanted(self.output_logprobs(), of_prompt),
        )

    def output_logprobs(self) -> int | None:
        """The number of alternatives that are reported for each token of an answer; None: no log-probabilities."""
        raise NotImplementedError

    def num_logprobs(self) -> int | None:
        """The number of alternatives that are computed, for tokens of the prompt and of the answer alike."""
        wanted, of_prompt = self.output_logprobs(), self.prompt_logprobs
        if of_prompt is None or (wanted is not None and wanted < 0):  # the latter is refused with the others
            return wanted
        if self.stream:
            refuse("prompt_logprobs", "not with stream")
        if not 0 <= of_prompt <= MAX_LOGPROBS:
            refuse("prompt_logprobs", f"must be in [0, {MAX_LOGPROBS}]")
        return max(of_prompt, wanted or 0)


_switches = operator.attrgetter(*ALWAYS_ON)
_structured = operator.attrgetter(*structured.FIELDS)
_UNCONSTRAINED = (None,) * len(structured.FIELDS)


class Completion(Common, kw_only=True):
    """POST /v1/completions."""

    prompt: msgspec.Raw = msgspec.Raw(b"null")
    """A TokenPrompt if `cut_prompt` has read it already."""
    suffix: str | None = None
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

    def check_served(self) -> None:
        super().check_served()
        if self.suffix:
            refuse("suffix", "is not served")

    def token_limit(self) -> int | None:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def output_logprobs(self) -> int | None:
        return self.logprobs


class Chat(Common, kw_only=True):
    """POST /v1/chat/completions."""

    own_names = {"prompt": "messages", "logprobs": "top_logprobs"}

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
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

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
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    def names(self) -> dict[str, str]:
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return super().names() | {"max_tokens": limit}

    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def output_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            refuse("top_logprobs", "only with logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class ChatBody(Protocol):
    """A body with a chat for a template."""

    continue_final_message: bool | None
    add_generation_prompt: bool | None
    template_args: dict[str, Any] | None


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
    return ChatPrompt(checked_messages(messages), tools, partial, (effort or {}) | (body.template_args or {}))


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
        msgspec.structs.force_setattr(found, "prompt", TokenPrompt(ids))  # not what is decoded from JSON
    return found
