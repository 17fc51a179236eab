"""Functions as tools of a model: how it is told of them, and how its calls become arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from radixrt.lang.tools import Tool

ToolLike = Callable[..., Any] | dict[str, Any]
"""A function, a Tool, or a tool in OpenAI's format, which only describes one."""


class Function:
    """A function that a model may call. `arguments` is a Struct with a field for each parameter; a parameter with a
    default may be left out."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises TypeError for parameters that cannot be given by name, or of whose type no schema is known."""
        self.tool: Tool[Any] = function if isinstance(function, Tool) else Tool(function)
        self.name = self.tool.name
        self.arguments = _arguments(self.name, self.tool.function)

    def description(self) -> dict[str, Any]:
        """In OpenAI's format."""
        function: dict[str, Any] = {"name": self.name, "parameters": _schema(self.name, self.arguments)}
        if said := inspect.getdoc(self.tool.function):
            function["description"] = said
        return {"type": "function", "function": function}

    def parse(self, text: str) -> dict[str, Any]:
        """Keyword arguments, of the parameters' types, of what a model wrote. Raises ValueError that says what is wrong
        with it."""
        found = msgspec.json.decode(text or "{}", type=self.arguments)
        given = ((name, getattr(found, name)) for name in found.__struct_fields__)
        return {name: value for name, value in given if value is not UNSET}


def described_tools(what: str, tools: Sequence[ToolLike]) -> tuple[dict[str, Any], ...]:
    """Tools in OpenAI's format. Raises TypeError, which begins with `what`, for anything that is no tool."""
    if isinstance(tools, dict | str) or callable(tools):
        raise TypeError(f"{what}: tools are several, not one: write tools=[...]")
    return tuple(_described(what, tool) for tool in tools)


def _described(what: str, tool: ToolLike) -> dict[str, Any]:
    if isinstance(tool, dict):
        return tool
    if not callable(tool):
        raise TypeError(f"{what}: a tool is a function or a dict in OpenAI's format, not {type(tool).__name__}")
    try:
        return Function(tool).description()
    except TypeError as problem:
        raise TypeError(f"{what}: {problem}") from problem


def _arguments(name: str, function: Callable[..., Any]) -> type[msgspec.Struct]:
    fields: list[Any] = []
    try:
        signature = inspect.signature(function, eval_str=True)
    except (ValueError, NameError) as problem:
        raise TypeError(f"the parameters of tool {name} are not known: {problem}") from problem
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"tool {name}: a model gives arguments by name, and cannot give {parameter}")
        kind = Any if parameter.annotation is parameter.empty else parameter.annotation
        optional = parameter.default is not parameter.empty
        fields.append((parameter.name, kind | UnsetType, UNSET) if optional else (parameter.name, kind))
    return msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)


def _schema(name: str, arguments: type[msgspec.Struct]) -> dict[str, Any]:
    """The JSON schema of a function's arguments."""
    try:
        (root,), others = msgspec.json.schema_components([arguments], ref_template="#/$defs/{name}")
    except TypeError as problem:
        raise TypeError(f"no schema is known of the parameters of tool {name}: {problem}") from problem
    own = others.pop(root["$ref"].rpartition("/")[2])
    own.pop("title", None)
    return own | {"$defs": others} if others else own
