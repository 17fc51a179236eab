"""Validates requests of Anthropic's API, and converts them to messages. Pure; every error names the field.

Unknown fields are ignored; a known field that is not supported is refused.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from radixrt.frontend.anthropic.blocks import Block
from radixrt.frontend.anthropic.errors import NO_THREADS
from radixrt.frontend.anthropic.history import History
from radixrt.frontend.anthropic.tools import tool_use
from radixrt.frontend.formats.structured import Constraint
from radixrt.frontend.formats.tools import ToolUse
from radixrt.frontend.generate.defaults import Defaults
from radixrt.frontend.http.errors import ApiError, refuse
from radixrt.frontend.openai.schema import Int, thinking_args
from radixrt.messages import ChatPrompt, Grammar, Name, Prompt, Sampling

UNSERVED = ("compaction", "container", "mcp_servers")
EFFORTS = ("low", "medium", "high", "xhigh", "max")
THINKING = ("enabled", "adaptive", "between_tools", "disabled")


class Counted(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens: the fields that determine the prompt; None counts as absent."""

    model: Name
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """As in OpenAI's API here: arguments for the template."""
    cache_salt: Name | None = None
    """As in OpenAI's API here: narrows the namespace that the key gives."""
    thread: Any = None

    def names(self) -> dict[str, str]:
        """Maps the fields of messages to the caller's names."""
        return {"prompt": "messages", "stop": "stop_sequences", "template_args": "chat_template_kwargs"}

    def tool_use(self) -> ToolUse:
        """Which tools an answer may or must call."""
        return tool_use(self.tools, self.tool_choice)

    def prompt(self, use: ToolUse, changed: Block | None = None) -> ChatPrompt:
        """The chat; with the block `changed` made longer, if given."""
        if self.thread is not None:
            message = "is not served; send the whole conversation without it"
            raise ApiError(400, f"thread: {message}", "thread", NO_THREADS)
        history = History(self.system, self.messages, changed)
        arguments = thinking_args(self.thinks()) | self.effort() | (self.chat_template_kwargs or {})
        return ChatPrompt(history.messages, use.shown, history.partial, arguments)

    def thinks(self) -> bool:
        """Whether the model is asked to think; as with Anthropic, only if requested. The budget is ignored."""
        thinking = self.thinking or {"type": "disabled"}
        kind, budget = thinking.get("type"), thinking.get("budget_tokens")
        if kind not in THINKING:
            refuse("thinking.type", f"must be one of {', '.join(THINKING)}, not {kind!r}")
        if kind == "enabled" and (type(budget) is not int or budget < 1):
            refuse("thinking.budget_tokens", "must be a number of tokens, at least 1")
        return kind != "disabled"

    def effort(self) -> dict[str, Any]:
        """The chat template's arguments for the reasoning effort; {} if the request does not set it."""
        effort = (self.output_config or {}).get("effort")
        if effort is None:
            return {}
        if effort not in EFFORTS:
            refuse("output_config.effort", f"must be one of {', '.join(EFFORTS)}, not {effort!r}")
        return {"reasoning_effort": effort}


class Messages(Counted, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    output_format: Any = None
    """The name of `output_config.format` in the beta structured-outputs-2025-11-13."""
    compaction: Any = None
    container: Any = None
    mcp_servers: Any = None

    def choices(self) -> int:
        """The number of choices."""
        return 1

    def wants_usage(self) -> bool:
        """Whether a stream includes the usage."""
        return True

    def prompts(self, use: ToolUse) -> list[Prompt]:
        """The chat; its template gets the tools of `use`."""
        return [self.prompt(use)]

    def constraint(self) -> Constraint | None:
        """The constraint on the text of an answer, if any."""
        form, field = (self.output_config or {}).get("format"), "output_config.format"
        if self.output_format is not None:
            if form is not None:
                refuse("output_format", "is output_config.format by another name: only one of them can be followed")
            form, field = self.output_format, "output_format"
        if form is None:
            return None
        if not isinstance(form, dict) or form.get("type") != "json_schema":
            refuse(f"{field}.type", "must be 'json_schema'")
        if not isinstance(form.get("schema"), dict):
            refuse(f"{field}.schema", "must be a JSON schema")
        text = json.dumps(form["schema"], ensure_ascii=False, separators=(",", ":"))
        return Constraint(Grammar("json_schema", text), f"{field}.schema")

    def sampling(self, defaults: Defaults) -> Sampling:
        """The sampling parameters; `defaults` for those that the request does not set."""
        for name in UNSERVED:
            if getattr(self, name):
                refuse(name, "is not served")
        if self.max_tokens < 1:
            refuse("max_tokens", "must be at least 1")
        user = (self.metadata or {}).get("user_id")
        if not isinstance(user, str | None):
            refuse("metadata.user_id", "must be a string")
        fields = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        given = {name: value for name, value in fields.items() if value is not None}
        stop = tuple(self.stop_sequences or ())
        return Sampling(**{**defaults, **given}, max_tokens=self.max_tokens, stop=stop)
