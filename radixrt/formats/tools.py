"""The tools of a request, and which of them an answer may or must call. Every error names the field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from radixrt.formats.parsing import Function, Functions
from radixrt.requests.schemas.inexact import Inexact
from radixrt.requests.schemas.shape import well_formed
from radixrt.requests.schemas.widen import widened
from radixrt.tokens.errors import refuse

MAX_TOOLS = 1024
MAX_NAME = 256
CHOICES = ("auto", "none", "required")
Arguments = Callable[[dict[str, Any]], Any]
"""Writes arguments of a schema; see `parsing.ToolFormat`."""
ANY_OBJECT: dict[str, Any] = {"type": "object"}
SEPARATOR = "__"
"""Between the namespace and the name of a function."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function; `field` is the field of the request that defines it."""

    name: str
    field: str
    schema: dict[str, Any]
    """The JSON schema of its arguments, an object."""
    strict: bool = False
    """Whether arguments must follow the schema even if the model is free to call the function or not."""
    malformed: tuple[str, ...] = ()
    """JSON pointers to what the schema lacks of the client's, as it was no JSON schema."""
    own: str = "parameters"
    """The client's name for the schema."""

    @property
    def schema_field(self) -> str:
        return f"{self.field}.{self.own}"

    def function(self, arguments: Arguments, *, loose: bool = False) -> Function:
        """The Function for a grammar whose arguments are written by `arguments`. If it is not strict, its schema is the
        nearest wider one that can be enforced; with `loose`, that of any object. Raises FieldError if it is strict and
        cannot be enforced."""
        if not self.strict:
            return Function(self.name, ANY_OBJECT if loose else widened(self.schema, arguments)[0])
        try:
            arguments(self.schema)
        except Inexact as problem:
            refuse(self.schema_field, f"the JSON schema cannot be enforced: {problem}")
        return Function(self.name, self.schema)

    def unenforced(self, arguments: Arguments) -> list[str]:
        """JSON pointers to the keywords of the schema that `function` leaves out."""
        return [] if self.strict else [f"{self.schema_field}{at}" for at in widened(self.schema, arguments)[1]]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Which tools an answer may or must call; by default none."""

    tools: tuple[Tool, ...] = ()
    forced: tuple[Tool, ...] = ()
    """If not empty, the answer must consist of one or more calls of these, and nothing else."""
    parallel: bool = True
    """Whether an answer may have several calls."""
    shown: list[dict[str, Any]] | None = None
    """The tools that the chat template gets."""
    limited: bool = False
    """Whether the template gets more tools than the answer may call."""

    @property
    def functions(self) -> Functions:
        return {tool.name: tool.schema for tool in self.tools}


NO_TOOLS = ToolUse()


def flat_name(namespace: Any, name: str) -> str:
    """The name of a function for the model, and in its history; `namespace` is that of the function, if it has one."""
    return f"{namespace.removesuffix(SEPARATOR)}{SEPARATOR}{name}" if namespace else name


def tool_use(tools: list[dict[str, Any]] | None, choice: Any, parallel: bool | None) -> ToolUse:
    """The ToolUse of `tools`, `tool_choice` and `parallel_tool_calls` of OpenAI's API. Raises FieldError that names
    an invalid field."""
    found = read_tools(tools or [], "tools[{}]", _tool)
    chosen = _choice(choice)
    if not found:
        if chosen.mode == "required" or chosen.names:
            refuse("tool_choice", "there are no tools to choose from")
        return NO_TOOLS
    if chosen.mode == "none":
        return NO_TOOLS
    known = {tool.name for tool in found}
    for name, place in chosen.names.items():
        if name not in known:
            refuse(place, f"there is no tool {name!r}")
    usable = tuple(tool for tool in found if tool.name in chosen.names) if chosen.names else found
    forced = usable if chosen.mode == "required" else ()
    parallel = parallel is not False and not chosen.single
    return ToolUse(usable, forced, parallel, tools, limited=len(usable) < len(found))


@dataclass(frozen=True, slots=True)
class _Choice:
    """A parsed `tool_choice`. `names`: the tools that may be called, with the fields that name them; empty: all."""

    mode: str
    names: dict[str, str] = field(default_factory=dict)
    single: bool = False
    """Whether exactly one call of the named function is required."""


def _choice(choice: Any) -> _Choice:
    if choice is None or choice in CHOICES:
        return _Choice(choice or "auto")
    if not isinstance(choice, dict):
        refuse("tool_choice", f"must be one of {', '.join(CHOICES)}, or name functions; not {choice!r}")
    match choice.get("type"):
        case "function":
            name, place = _function_name(choice, "tool_choice")
            return _Choice("required", {name: place}, single=True)
        case "allowed_tools":
            return _allowed(choice.get("allowed_tools"), "tool_choice.allowed_tools")
        case kind:
            refuse("tool_choice.type", f"must be 'function' or 'allowed_tools', not {kind!r}")


def _allowed(allowed: Any, place: str) -> _Choice:
    """Parse `allowed_tools`. The chat template still gets all tools, so that prompts do not change with the choice."""
    if not isinstance(allowed, dict):
        refuse(place, "must be an object with a mode and tools")
    if allowed.get("mode") not in ("auto", "required"):
        refuse(f"{place}.mode", f"must be auto or required, not {allowed.get('mode')!r}")
    tools = allowed.get("tools")
    if not isinstance(tools, list) or not tools:
        refuse(f"{place}.tools", "must be a list of tools, at least one")
    return _Choice(allowed["mode"], dict(_function_name(tool, f"{place}.tools[{i}]") for i, tool in enumerate(tools)))


def _function_name(chosen: Any, place: str) -> tuple[str, str]:
    """Returns (the name of a chosen function, its field)."""
    if not isinstance(chosen, dict) or chosen.get("type") != "function":
        refuse(f"{place}.type", "must be 'function'")
    function = chosen.get("function")
    if not isinstance(function, dict):
        refuse(f"{place}.function", "must be an object with the name of a function")
    name = function.get("name")
    if not isinstance(name, str):
        refuse(f"{place}.function.name", "must be a string")
    return name, f"{place}.function.name"


def read_tools(
    tools: list[dict[str, Any]], at: str, read: Callable[[str, dict[str, Any]], Tool | None]
) -> tuple[Tool, ...]:
    """All tools of a request. `read` parses one, given its field (`at` with its number); None leaves it out. Names
    must differ."""
    if len(tools) > MAX_TOOLS:
        refuse("tools", f"at most {MAX_TOOLS} tools")
    found: dict[str, Tool] = {}
    for i, tool in enumerate(tools):
        if (one := read(at.format(i), tool)) is None:
            continue
        if one.name in found:
            refuse(f"{one.field}.name", f"there are two tools {one.name!r}")
        found[one.name] = one
    return tuple(found.values())


def _tool(field: str, tool: dict[str, Any]) -> Tool:
    if tool.get("type") != "function":
        refuse(f"{field}.type", f"must be 'function', not {tool.get('type')!r}")
    function = tool.get("function")
    field += ".function"
    if not isinstance(function, dict):
        refuse(field, "must be an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        refuse(f"{field}.name", f"must be a string of 1 to {MAX_NAME} characters")
    if not isinstance(function.get("description"), str | None):
        refuse(f"{field}.description", "must be a string")
    if not isinstance(function.get("strict"), bool | None):
        refuse(f"{field}.strict", "must be true or false")
    strict = bool(function.get("strict"))
    schema, malformed = read_parameters(f"{field}.parameters", function.get("parameters"), strict)
    return Tool(name, field, schema, strict, malformed)


# ---------------------------------------------------------------- JSON schemas


def read_parameters(field: str, schema: Any, strict: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(the JSON schema of a function's arguments, without what is malformed in it; JSON pointers to that). Raises
    FieldError if it is none of an object, or if anything is malformed and the function is `strict`."""
    if schema is None:
        return ANY_OBJECT, ()
    if not isinstance(schema, dict):
        refuse(field, "must be the JSON schema of an object")
    try:
        found, malformed = well_formed(schema)
    except Inexact as problem:
        refuse(field, str(problem))
    for one in malformed if strict else ():
        refuse(field + _dotted(one.path), one.why)
    kind = found.get("type", "object")
    if kind == ["object"] or (not strict and "object" in kind):  # arguments are no other value
        kind = "object"
    if kind != "object":
        refuse(f"{field}.type", f"must be 'object', not {kind!r}")
    return ANY_OBJECT | found | {"type": kind}, tuple(one.place for one in malformed)


def _dotted(path: tuple[str | int, ...]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
