"""Validates requests of OpenAI's Responses API, and converts them to messages. Pure; every error names the field.

An unsupported field is refused if it would change the answer, and otherwise accepted.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from radixrt.frontend.formats.structured import OBJECT, Constraint
from radixrt.frontend.formats.tools import Tool, ToolUse, tool_use
from radixrt.frontend.generate.defaults import Defaults
from radixrt.frontend.http.errors import ApiError, refuse
from radixrt.frontend.openai.schema import Int, Seed, check_verbosity, effort_args
from radixrt.frontend.responses.history import Message, messages_of
from radixrt.frontend.responses.tools import Listed, chosen_of, field_in, flat_name, listed
from radixrt.messages import ChatPrompt, Grammar, Name, Prompt, Sampling

UNSERVED = ("background", "context_management", "conversation", "moderation", "prompt")
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
LOGPROBS = "message.output_text.logprobs"


class Create(msgspec.Struct, kw_only=True):
    """POST /v1/responses."""

    input: str | list[dict[str, Any]] | None = None
    model: Name | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    max_output_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    store: bool | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    truncation: str | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    """A routing hint, which is ignored: requests are placed by their tokens."""
    background: bool | None = None
    context_management: Any = None
    conversation: Any = None
    moderation: Any = None
    prompt: Any = None
    top_logprobs: Int | None = None
    top_k: Int | None = None
    """This field and the next ones are vLLM's, as in chats here."""
    min_p: float | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    cache_salt: Name | None = None
    """As in chats here: narrows the namespace that the key gives."""
    chat_template_kwargs: dict[str, Any] | None = None
    """As in chats here: arguments for the template."""

    @property
    def stores(self) -> bool:
        return self.store is not False

    @property
    def logprobs(self) -> int | None:
        """The number of most likely tokens that are reported for each; None: no log-probabilities."""
        asked = LOGPROBS in (self.include or ()) or self.top_logprobs
        return (self.top_logprobs or 0) if asked else None

    def checked(self) -> None:
        """Raise ApiError (400) for unsupported fields."""
        for name in UNSERVED:
            if getattr(self, name):
                refuse(name, "is not served")
        # 'auto' would shorten a prompt that is too long; here it is refused.
        if self.truncation not in (None, "auto", "disabled"):
            refuse("truncation", f"must be 'auto' or 'disabled', not {self.truncation!r}")
        check_verbosity((self.text or {}).get("verbosity"), "text.verbosity")

    # ------------------------------------------------------------ parts

    def tool_use(self) -> ToolUse:
        """Which tools an answer may or must call; this API has a flat format of tools."""
        functions = self.functions()
        try:
            tools = [one.nested() for one in functions]
            use = tool_use(tools, _nested_choice(self.tool_choice), self.parallel_tool_calls)
        except ApiError as error:
            param = _flat_name(functions, error.param)
            raise ApiError(400, param + error.message.removeprefix(error.param), param) from None
        return dataclasses.replace(use, tools=_flat(functions, use.tools), forced=_flat(functions, use.forced))

    def functions(self) -> list[Listed]:
        """The supported tools."""
        return listed(self.tools or [])

    def constraint(self) -> Constraint | None:
        """The constraint on the text of an answer, if any."""
        field = "text.format"
        form = (self.text or {}).get("format")
        if form is None:
            return None
        match form.get("type") if isinstance(form, dict) else form:
            case "text":
                return None
            case "json_object":
                return Constraint(OBJECT, field)
            case "json_schema":
                if not isinstance(form.get("name"), str):
                    refuse(f"{field}.name", "must be a string")
                if not isinstance(form.get("schema"), dict):
                    refuse(f"{field}.schema", "must be a JSON schema")
                text = json.dumps(form["schema"], ensure_ascii=False, separators=(",", ":"))
                return Constraint(Grammar("json_schema", text), f"{field}.schema")
            case kind:
                refuse(f"{field}.type", f"must be text, json_object or json_schema, not {kind!r}")

    def template_args(self) -> dict[str, Any]:
        effort = effort_args((self.reasoning or {}).get("effort"), "reasoning.effort")
        return effort | (self.chat_template_kwargs or {})


class Asked:
    """A request with the messages that it continues."""

    def __init__(self, body: Create, before: Sequence[Message] = ()) -> None:
        self.body = body
        body.checked()
        if body.input is None and not before:
            refuse("input", "is missing")
        self.before = before
        self.added = messages_of(body.input or [], before)
        self.called: dict[str, dict[str, str]] = {}
        """The client's names of a function, by its name for the model; filled by `tool_use`."""
        self.custom: set[str] = set()
        """The names of custom tools for the model; filled by `tool_use`."""
        self.model, self.stream, self.cache_salt = body.model, body.stream, body.cache_salt

    def choices(self) -> int:
        """The number of choices."""
        return 1

    def wants_usage(self) -> bool:
        """Whether a stream includes the usage."""
        return True

    def names(self) -> dict[str, str]:
        """Maps the fields of messages to the caller's names."""
        own = {"max_tokens": "max_output_tokens", "template_args": "chat_template_kwargs", "logprobs": "top_logprobs"}
        return own | {"prompt": "input", "messages": "input"}

    def tool_use(self) -> ToolUse:
        """See Create."""
        use = self.body.tool_use()
        functions = self.body.functions()
        self.called = {one.name: one.own for one in functions}
        self.custom = {one.name for one in functions if one.custom}
        return use

    def constraint(self) -> Constraint | None:
        """See Create."""
        return self.body.constraint()

    def prompts(self, use: ToolUse) -> list[Prompt]:
        """The chat. Instructions apply to this request only; earlier ones had their own."""
        first = [{"role": "system", "content": self.body.instructions}] if self.body.instructions else []
        return [ChatPrompt([*first, *self.before, *self.added], use.shown, template_args=self.body.template_args())]

    def sampling(self, defaults: Defaults) -> Sampling:
        """The sampling parameters; `defaults` for those that the request does not set. Kept as `sampled`, for the
        reply."""
        body = self.body
        if body.max_output_tokens is not None and body.max_output_tokens < 1:
            refuse("max_output_tokens", "must be at least 1")
        given = {name: value for name in SAMPLING if (value := getattr(body, name)) is not None}
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        limits = {"max_tokens": body.max_output_tokens, "logprobs": body.logprobs}
        self.sampled = Sampling(**{**defaults, **given}, **limits, stop=stop)
        return self.sampled


def _flat_name(functions: list[Listed], field: str) -> str:
    """The field of this API for a field of a chat's tools or tool_choice, which are nested there and flat here."""
    if field.startswith("tool_choice"):
        return field.replace(".allowed_tools", "").replace(".function", "")
    return field_in(functions, field)


def _flat(functions: list[Listed], tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """Tools with the field names of this API."""
    return tuple(dataclasses.replace(tool, field=_flat_name(functions, tool.field)) for tool in tools)


def _nested_choice(choice: Any) -> Any:
    """A tool_choice in the format of chats."""
    if not isinstance(choice, dict):
        return choice
    match choice.get("type"):
        case "function" | "custom":
            name, namespace = choice.get("name"), choice.get("namespace")
            if not isinstance(namespace, str | None):
                refuse("tool_choice.namespace", "must be a string")
            both = isinstance(name, str) and namespace is not None
            return {"type": "function", "function": {"name": flat_name(namespace, name) if both else name}}
        case "allowed_tools":
            tools = choice.get("tools")
            nested = [_nested_choice(tool) for tool in chosen_of(tools)] if isinstance(tools, list) else tools
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": nested}}
    return choice
