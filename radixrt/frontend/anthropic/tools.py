"""Anthropic's tools as ToolUse. Every refusal names the field."""

from __future__ import annotations

from typing import Any

from radixrt.frontend.errors import refuse
from radixrt.frontend.tools import ANY_OBJECT, MAX_NAME, NO_TOOLS, Tool, ToolUse, check_parameters, read_tools

CHOICES = ("auto", "any", "tool", "none")
CALL_PREFIX, PREFIX = "call_", "toolu_"


def tool_use(tools: list[dict[str, Any]] | None, choice: dict[str, Any] | None) -> ToolUse:
    """What an answer may do. ApiError (400) names the field."""
    found = read_tools(tools or [], "tools.{}", _tool)
    kind, name, parallel = _choice(choice)
    if kind in ("any", "tool") and not found:
        refuse("tool_choice", "there are no tools to choose from")
    if not found or kind == "none":
        return NO_TOOLS
    shown = [shown_tool(tool) for tool in tools or []]
    if kind == "auto":
        return ToolUse(found, parallel=parallel, shown=shown)
    if kind == "any":
        return ToolUse(found, found, parallel, shown)
    only = tuple(tool for tool in found if tool.name == name)
    if not only:
        refuse("tool_choice.name", f"there is no tool {name!r}")
    return ToolUse(found, only, False, shown)


def shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as chat templates take it, which is OpenAI's way."""
    function = {"name": tool["name"]}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function | {"parameters": tool["input_schema"]}}


def _choice(choice: dict[str, Any] | None) -> tuple[str, str, bool]:
    """(kind, name of the one tool that is to be called, whether there may be several calls)"""
    if choice is None:
        return "auto", "", True
    kind = choice.get("type")
    if kind not in CHOICES:
        refuse("tool_choice.type", f"must be one of {', '.join(CHOICES)}, not {kind!r}")
    name = choice.get("name", "")
    if kind == "tool" and (not isinstance(name, str) or not name):
        refuse("tool_choice.name", "must be the name of a tool")
    single = choice.get("disable_parallel_tool_use")
    if not isinstance(single, bool | None):
        refuse("tool_choice.disable_parallel_tool_use", "must be true or false")
    return kind, name, not single


def _tool(field: str, tool: dict[str, Any]) -> Tool:
    if tool.get("type") not in (None, "custom"):
        refuse(f"{field}.type", f"must be 'custom': {tool['type']!r} is a tool of Anthropic's, not served here")
    name = tool.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        refuse(f"{field}.name", f"must be a string of 1 to {MAX_NAME} characters")
    if not isinstance(tool.get("description"), str | None):
        refuse(f"{field}.description", "must be a string")
    if not isinstance(tool.get("strict"), bool | None):
        refuse(f"{field}.strict", "must be true or false")
    if "input_schema" not in tool:
        refuse(f"{field}.input_schema", "is missing")
    check_parameters(f"{field}.input_schema", tool["input_schema"])
    return Tool(name, field, tool["input_schema"] or ANY_OBJECT, bool(tool.get("strict")))


# ---------------------------------------------------------------- ids of calls


def shown_id(call_id: str) -> str:
    """The id of a call for a client. Chat templates may want ids of their own form, so it must lead back."""
    return PREFIX + call_id.removeprefix(CALL_PREFIX)


def template_id(shown: str) -> str:
    """The id that a client knows as `shown`, for the chat template."""
    own = shown.removeprefix(PREFIX)
    # Mistral's templates take nothing but nine letters and digits.
    return own if len(own) == 9 and own.isalnum() else CALL_PREFIX + own
