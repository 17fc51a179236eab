"""Converts Anthropic's tools to a ToolUse. Every error names the field.

custom                          -> a function
bash, text_editor, memory, ...  -> a function, by `defined`
web_search, code_execution, ... -> left out if there are others, otherwise refused (Anthropic runs them)

Tools with `defer_loading` are not shown: `references` tells of those that a search has found.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, NoReturn

from radixrt.formats.deferred import check_deferred
from radixrt.formats.tools import MAX_NAME, NO_TOOLS, Tool, ToolUse, read_parameters, read_tools
from radixrt.frontend.anthropic.defined import DEFINED, Defined
from radixrt.frontend.http.errors import one_of, refuse

CHOICES = ("auto", "any", "tool", "none")
SEARCH = r"tool_search_tool_(regex|bm25)(_\d{8})?"
HOSTED = re.compile(rf"(web_search|web_fetch|code_execution)_\d{{8}}|{SEARCH}")
"""Kinds of tools that Anthropic runs, and that a model need not use."""
CALL_PREFIX, PREFIX = "call_", "toolu_"


def tool_use(tools: list[dict[str, Any]] | None, choice: dict[str, Any] | None) -> ToolUse:
    """The ToolUse of a request. Raises ApiError (400) that names an invalid field."""
    found = read_tools(tools or [], "tools.{}", _tool)
    if tools and not found:
        _refuse_kind("tools.0", tools[0]["type"])
    kind, name, parallel = _choice(choice)
    if kind in ("any", "tool") and not found:
        refuse("tool_choice", "there are no tools to choose from")
    if not found or kind == "none":
        return NO_TOOLS
    shown = [shown_tool(tool) for tool in visible(tools)]
    if kind == "auto":
        return ToolUse(found, parallel=parallel, shown=shown)
    if kind == "any":
        return ToolUse(found, found, parallel, shown)
    only = tuple(tool for tool in found if tool.name == name)
    if not only:
        refuse("tool_choice.name", f"there is no tool {name!r}")
    return ToolUse(found, only, False, shown)


def served(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The tools of a validated request, without those that are left out."""
    return [tool for tool in tools or [] if not _is_hosted(tool)]


def visible(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The served tools that the prompt lists. All of them if nothing can find the deferred ones: Anthropic's search is
    not run here, any other tool may be a search."""
    found = served(tools)
    if any(re.fullmatch(SEARCH, tool.get("type") or "") for tool in tools or []):
        return found
    return [tool for tool in found if not tool.get("defer_loading")] or found


def shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in the format of chat templates, which is OpenAI's."""
    if (defined := DEFINED.get(tool.get("type") or "")) is not None:
        function = {"name": defined.name, "description": defined.description, "parameters": defined.schema}
        return {"type": "function", "function": function}
    names = {"description": "description", "input_schema": "parameters"}
    about = {name: tool[own] for own, name in names.items() if tool.get(own) is not None}
    return {"type": "function", "function": {"name": tool["name"]} | about}


def _choice(choice: dict[str, Any] | None) -> tuple[str, str, bool]:
    """Returns (kind, the name of the tool that must be called, whether there may be several calls)."""
    if choice is None:
        return "auto", "", True
    kind = one_of(choice.get("type"), CHOICES, "tool_choice.type")
    name = choice.get("name", "")
    if kind == "tool" and (not isinstance(name, str) or not name):
        refuse("tool_choice.name", "must be the name of a tool")
    single = choice.get("disable_parallel_tool_use")
    if not isinstance(single, bool | None):
        refuse("tool_choice.disable_parallel_tool_use", "must be true or false")
    return kind, name, not single


def _is_hosted(tool: dict[str, Any]) -> bool:
    kind = tool.get("type")
    return isinstance(kind, str) and HOSTED.fullmatch(kind) is not None


def _refuse_kind(field: str, kind: Any) -> NoReturn:
    refuse(f"{field}.type", f"must be 'custom': {kind!r} is a tool of Anthropic's, not served here")


def _tool(field: str, tool: dict[str, Any]) -> Tool | None:
    """Convert a tool; None for one that is left out."""
    if _is_hosted(tool):
        return None
    check_deferred(field, tool)
    kind = tool.get("type")
    if isinstance(kind, str) and kind in DEFINED:
        return _defined(field, tool, DEFINED[kind])
    if kind not in (None, "custom"):
        _refuse_kind(field, kind)
    name = tool.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        refuse(f"{field}.name", f"must be a string of 1 to {MAX_NAME} characters")
    if not isinstance(tool.get("description"), str | None):
        refuse(f"{field}.description", "must be a string")
    strict = _strict(field, tool)
    schema, malformed = read_parameters(f"{field}.input_schema", tool.get("input_schema"), strict)
    return Tool(name, field, schema, strict, malformed, "input_schema")


def _defined(field: str, tool: dict[str, Any], defined: Defined) -> Tool:
    if tool.get("name") != defined.name:
        refuse(f"{field}.name", f"must be {defined.name!r} for {tool['type']}, not {tool.get('name')!r}")
    return Tool(defined.name, field, defined.schema, _strict(field, tool))


def _strict(field: str, tool: dict[str, Any]) -> bool:
    if not isinstance(tool.get("strict"), bool | None):
        refuse(f"{field}.strict", "must be true or false")
    return bool(tool.get("strict"))


# ---------------------------------------------------------------- ids of calls


_GIVEN = re.compile("[0-9a-f]{24}")
_MODELS_OWN = re.compile(r"[0-9A-Za-z]{9}|.+:[0-9]+", re.DOTALL)
"""Ids that models define: Mistral's, and Kimi's, which contain the names of functions."""


def shown_id(call_id: str) -> str:
    """The id of a call for a client. It can be converted back, since chat templates may require ids of a special
    form."""
    return PREFIX + call_id.removeprefix(CALL_PREFIX)


def template_id(shown: str) -> str:
    """The id for the chat template that a client knows as `shown`. A foreign one becomes nine letters and digits, as
    Mistral's templates require."""
    own = shown.removeprefix(PREFIX)
    if _GIVEN.fullmatch(own):
        return CALL_PREFIX + own
    return own if _MODELS_OWN.fullmatch(own) else hashlib.sha256(shown.encode()).hexdigest()[:9]
