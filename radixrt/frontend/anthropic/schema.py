"""Validates requests of Anthropic's API, and converts them to messages. Pure; every error names the field.

Unknown fields are ignored; a known field that is not supported is refused.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from radixrt.formats.structured import Constraint
from radixrt.formats.tools import ToolUse
from radixrt.frontend.anthropic.blocks import Block
from radixrt.frontend.anthropic.history import History
from radixrt.frontend.anthropic.tools import tool_use
from radixrt.frontend.generate.request import GenerationRequest, Int, thinking_args
from radixrt.frontend.http.anthropic_errors import NO_THREADS
from radixrt.frontend.http.errors import ApiError, one_of, refuse
from radixrt.messages import ChatPrompt, Grammar, Name, Prompt

EFFORTS = ("low", "medium", "high", "xhigh", "max")
THINKING = ("enabled", "adaptive", "between_tools", "disabled")


class Counted(GenerationRequest, kw_only=True):
    """POST /v1/messages/count_tokens: the fields that determine the prompt; None counts as absent."""

    model: Name
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    thread: Any = None

    own_names = {"prompt": "messages"}

    def tool_use(self) -> ToolUse:
        return tool_use(self.tools, self.tool_choice)

    def prompt(self, use: ToolUse, changed: Block | None = None) -> ChatPrompt:
        """The chat; with the block `changed` made longer, if given."""
        if self.thread is not None:
            message = "is not served; send the whole conversation without it"
            raise ApiError(400, f"thread: {message}", "thread", NO_THREADS)
        history = History(self.system, self.messages, changed, self.tools)
        arguments = thinking_args(self.thinks()) | self.effort() | (self.template_args or {})
        return ChatPrompt(history.messages, use.shown, history.partial, arguments)

    def thinks(self) -> bool:
        """Whether the model is asked to think; as with Anthropic, only if requested. The budget is ignored."""
        thinking = self.thinking or {"type": "disabled"}
        kind, budget = one_of(thinking.get("type"), THINKING, "thinking.type"), thinking.get("budget_tokens")
        if kind == "enabled" and (type(budget) is not int or budget < 1):
            refuse("thinking.budget_tokens", "must be a number of tokens, at least 1")
        return kind != "disabled"

    def effort(self) -> dict[str, Any]:
        """The chat template's arguments for the reasoning effort; {} if the request does not set it."""
        effort = (self.output_config or {}).get("effort")
        if effort is None:
            return {}
        return {"reasoning_effort": one_of(effort, EFFORTS, "output_config.effort")}


class Messages(Counted, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Int
    stop: list[str] | None = msgspec.field(default=None, name="stop_sequences")
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    output_format: Any = None
    """The name of `output_config.format` in the beta structured-outputs-2025-11-13."""
    compaction: Any = None
    container: Any = None
    mcp_servers: Any = None

    unserved = ("compaction", "container", "mcp_servers")

    def prompts(self, use: ToolUse) -> list[Prompt]:
        return [self.prompt(use)]

    def constraint(self) -> Constraint | None:
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

    def check_served(self) -> None:
        super().check_served()
        if not isinstance((self.metadata or {}).get("user_id"), str | None):
            refuse("metadata.user_id", "must be a string")
