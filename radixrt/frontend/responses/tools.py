"""Converts the tools of a request to functions. Every error names the field.

function                          -> itself
custom                            -> a function with one argument, the text `input`; a grammar of it is shown to the
                                     model, and not enforced: within JSON the text is escaped, and the grammar's is not
namespace (functions within it)   -> functions with both names: mcp__files + read: mcp__files__read
tool_search, if the client does it  -> a function; the tools with `defer_loading` are then not shown
web_search, image_generation, ... -> left out if there are functions, otherwise refused (OpenAI runs them);
                                     tool_search as well, if the client does not say that it does it
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from radixrt.formats.deferred import check_deferred
from radixrt.formats.tools import MAX_NAME, flat_name
from radixrt.frontend.http.errors import one_of, refuse

HOSTED = re.compile(r"(web_search|web_search_preview|file_search|code_interpreter|image_generation)(_\d{4}_\d\d_\d\d)?")
"""Kinds of tools that OpenAI runs, and that a model need not use. (Codex always lists web_search.)"""
SEARCH = "tool_search"
"""The kind of a search for tools, and the name of its function."""
SEARCH_ABOUT = "Search for functions that are not listed here. Those found can be called from then on."
QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
"""The schema of a search's arguments, if it has none."""
INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""The schema of a custom tool's arguments, as the model writes them; see `hosted` for those in a history."""
CALLED = {"function": "function_call", "custom": "custom_tool_call", SEARCH: "tool_search_call"}
"""The kinds of items that call tools, by the kind of tool."""
FORMS = {"lark": "grammar in the syntax of Lark", "regex": "regular expression"}
"""What the grammar of a custom tool is, by its `syntax`."""
_INDEX = re.compile(r"^tools\[(\d+)\](?:\.function)?")


@dataclass(frozen=True, slots=True)
class Listed:
    """A function or a custom tool; `field` is that of the request."""

    field: str
    tool: dict[str, Any]
    namespace: str = ""

    @property
    def name(self) -> str:
        """Its name for the model; "" if it has none."""
        name = SEARCH if self.tool["type"] == SEARCH else self.tool.get("name")
        return flat_name(self.namespace, name) if isinstance(name, str) and name else ""

    @property
    def custom(self) -> bool:
        """Whether it is a custom tool, which takes any text."""
        return self.tool["type"] == "custom"

    @property
    def deferred(self) -> bool:
        """Whether it is hidden until a search finds it."""
        return bool(self.tool.get("defer_loading"))

    @property
    def item_kind(self) -> str:
        """The kind of an item that calls it."""
        return CALLED[self.tool["type"]]

    @property
    def own(self) -> dict[str, str]:
        """Its names for the client."""
        if self.tool["type"] == SEARCH:
            return {"execution": "client"}
        return {"name": self.tool["name"]} | ({"namespace": self.namespace} if self.namespace else {})

    def nested(self) -> dict[str, Any]:
        """The tool in the format of chats."""
        names = ("description", "parameters", "strict")
        function = {name: self.tool[name] for name in names if self.tool.get(name) is not None}
        if self.tool["type"] == SEARCH:
            function = {"description": SEARCH_ABOUT, "parameters": QUERY} | function
        if self.custom:
            function |= {"parameters": INPUT} | self._with_grammar()
        return {"type": "function", "function": {"name": self.name} | function}

    def _with_grammar(self) -> dict[str, str]:
        """The description of a custom tool with the grammar of its input; {} if it has none."""
        form = self.tool.get("format")
        if form is None or form["type"] == "text":
            return {}
        said = f"The input must match this {FORMS[form['syntax']]}:\n{form['definition']}"
        about = self.tool.get("description")
        return {"description": f"{about}\n\n{said}" if about else said}


def listed(tools: list[dict[str, Any]]) -> list[Listed]:
    """The functions among the tools of a request, in order. Raises ApiError (400) for unsupported tools."""
    found = functions_in("tools", tools)
    kinds = [tool.get("type") for tool in tools]
    if not found and "namespace" in kinds:
        refuse(f"tools[{kinds.index('namespace')}].tools", "must not be empty")
    if tools and not found:
        refuse("tools[0].type", f"must be 'function': {tools[0].get('type')!r} is not served here")
    return found


def functions_in(field: str, tools: list[dict[str, Any]]) -> list[Listed]:
    """The functions among tools; `field` is that of the list."""
    return [one for i, tool in enumerate(tools) for one in _functions(f"{field}[{i}]", tool)]


def without_hosted(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The supported tools of a validated request."""
    return [tool for tool in tools if not _is_hosted(tool)]


def chosen_of(tools: list[Any]) -> list[Any]:
    """The supported tools of a tool_choice; all of them if none is supported, so that they are refused."""
    return [t for t in tools if not (isinstance(t, dict) and HOSTED.fullmatch(str(t.get("type"))))] or tools


def _is_hosted(tool: dict[str, Any]) -> bool:
    return tool["type"] == SEARCH and tool.get("execution") != "client" or bool(HOSTED.fullmatch(tool["type"]))


def field_in(tools: list[Listed], field: str) -> str:
    """The request's field for a field of `tools` in the format of chats."""
    return _INDEX.sub(lambda match: tools[int(match[1])].field, field)


def _functions(field: str, tool: dict[str, Any]) -> Iterator[Listed]:
    match tool.get("type"):
        case "function" | "custom":
            yield _one(field, tool)
        case "namespace":
            yield from _within(field, tool)
        case str() if _is_hosted(tool):
            return
        case "tool_search":
            yield Listed(field, tool)
        case kind:
            refuse(f"{field}.type", f"must be 'function', 'custom' or 'namespace': {kind!r} is not served here")


def _within(field: str, tool: dict[str, Any]) -> Iterator[Listed]:
    name, inner = tool.get("name"), tool.get("tools")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        refuse(f"{field}.name", f"must be a string of 1 to {MAX_NAME} characters")
    if not isinstance(inner, list) or not all(isinstance(one, dict) for one in inner):
        refuse(f"{field}.tools", "must be a list of functions")
    for i, one in enumerate(inner):
        if one.get("type") not in ("function", "custom"):
            refuse(f"{field}.tools[{i}].type", f"must be 'function' or 'custom', not {one.get('type')!r}")
        yield _one(f"{field}.tools[{i}]", one, name)


def _one(field: str, tool: dict[str, Any], namespace: str = "") -> Listed:
    if tool["type"] == "custom" and tool.get("format") is not None:
        _check_format(f"{field}.format", tool["format"])
        if not isinstance(tool.get("description"), str | None):
            refuse(f"{field}.description", "must be a string")
    check_deferred(field, tool)
    return Listed(field, tool, namespace)


def _check_format(field: str, form: Any) -> None:
    if not isinstance(form, dict) or form.get("type") not in ("text", "grammar"):
        refuse(f"{field}.type", "must be 'text' or 'grammar'")
    if form["type"] == "text":
        return
    one_of(form.get("syntax"), FORMS, f"{field}.syntax")
    if not isinstance(form.get("definition"), str) or not form["definition"]:
        refuse(f"{field}.definition", "must be a string that is not empty")
