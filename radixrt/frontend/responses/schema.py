"""Validates requests of OpenAI's Responses API, and converts them to messages. Pure; every error names the field.

An unsupported field is refused if it would change the answer, and otherwise accepted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec

from radixrt.formats.structured import OBJECT, Constraint, named_schema
from radixrt.formats.tools import Tool, ToolUse, flat_name, tool_use
from radixrt.frontend.generate.defaults import Defaults
from radixrt.frontend.generate.request import GenerationRequest, Int, check_verbosity, effort_args
from radixrt.frontend.http.errors import refuse
from radixrt.frontend.responses.history import Message, messages_of
from radixrt.frontend.responses.sealed import ENCRYPTED
from radixrt.frontend.responses.search import rendered, visible, with_found
from radixrt.frontend.responses.tools import SEARCH, Listed, chosen_of, field_in, listed
from radixrt.messages import ChatPrompt, Prompt, Sampling
from radixrt.tokens.errors import FieldError

LOGPROBS = "message.output_text.logprobs"


class Create(GenerationRequest, kw_only=True, dict=True):
    """POST /v1/responses. After `follow` it is a request with the messages that it continues."""

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    max_tokens: Int | None = msgspec.field(default=None, name="max_output_tokens")
    top_logprobs: Int | None = None
    store: bool | None = None
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

    unserved = ("background", "context_management", "conversation", "moderation", "prompt")
    own_names = {"prompt": "input", "messages": "input", "logprobs": "top_logprobs"}

    def follow(self, before: Sequence[Message]) -> None:
        """Set the messages that the request continues; checks it."""
        self.check_served()
        if self.input is None and not before:
            refuse("input", "is missing")
        self.before = before
        self.added = messages_of(self.input or [], before)
        self.called: dict[str, dict[str, str]] = {}
        """The client's names of a function, by its name for the model; filled by `tool_use`."""
        self.kinds: dict[str, str] = {}
        """The kind of the items that call a function, by its name for the model; filled by `tool_use`."""
        self.sampled = Sampling()
        """The sampling parameters, for the reply; filled by `sampling`."""

    @property
    def stores(self) -> bool:
        return self.store is not False

    @property
    def seals_reasoning(self) -> bool:
        """Whether reasoning items are to have an `encrypted_content`."""
        return ENCRYPTED in (self.include or ())

    def check_served(self) -> None:
        super().check_served()
        # 'auto' would shorten a prompt that is too long; here it is refused.
        if self.truncation not in (None, "auto", "disabled"):
            refuse("truncation", f"must be 'auto' or 'disabled', not {self.truncation!r}")
        check_verbosity((self.text or {}).get("verbosity"), "text.verbosity")

    def num_logprobs(self) -> int | None:
        asked = LOGPROBS in (self.include or ()) or self.top_logprobs
        return (self.top_logprobs or 0) if asked else None

    def prompts(self, use: ToolUse) -> list[Prompt]:
        """Instructions apply to this request only; earlier ones had their own."""
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        effort = effort_args((self.reasoning or {}).get("effort"), "reasoning.effort")
        arguments = effort | (self.template_args or {})
        return [ChatPrompt(rendered([*first, *self.before, *self.added]), use.shown, template_args=arguments)]

    def sampling(self, defaults: Defaults) -> Sampling:
        self.sampled = super().sampling(defaults)
        return self.sampled

    def tool_use(self) -> ToolUse:
        """This API has a flat format of tools."""
        own = self.functions()
        functions = with_found(own, [*self.before, *self.added])
        try:
            tools = [one.nested() for one in functions]
            use = tool_use(tools, _nested_choice(self.tool_choice), self.parallel_tool_calls)
        except FieldError as error:
            field = _flat_name(functions, error.field)
            raise FieldError(field, field + str(error).removeprefix(error.field)) from None
        self.called = {one.name: one.own for one in functions}
        self.kinds = {one.name: one.item_kind for one in functions}
        shown = [one.nested() for one in visible(own)] if use.tools else None
        usable, forced = _flat(functions, use.tools), _flat(functions, use.forced)
        return dataclasses.replace(use, tools=usable, forced=forced, shown=shown or None)

    def functions(self) -> list[Listed]:
        """The supported tools."""
        return listed(self.tools or [])

    def constraint(self) -> Constraint | None:
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
                return named_schema(form, field)
            case kind:
                refuse(f"{field}.type", f"must be text, json_object or json_schema, not {kind!r}")


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
            if isinstance(name, str):
                name = flat_name(namespace, name)
            return {"type": "function", "function": {"name": name}}
        case "tool_search":
            return {"type": "function", "function": {"name": SEARCH}}
        case "allowed_tools":
            tools = choice.get("tools")
            nested = [_nested_choice(tool) for tool in chosen_of(tools)] if isinstance(tools, list) else tools
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": nested}}
    return choice
