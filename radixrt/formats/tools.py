"""The tools of a request, and which of them an answer may or must call. Every error names the field."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from radixrt.formats.parsing import Function, Functions
from radixrt.requests.schemas.widen import widened
from radixrt.tokens.errors import refuse

MAX_TOOLS = 1024
MAX_NAME = 256
MAX_DEPTH = 64
TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
CHOICES = ("auto", "none", "required")
ANY_OBJECT: dict[str, Any] = {"type": "object"}
SEPARATOR = "__"
"""Between the namespace and the name of a function."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function; `field` is the field of the request that defines it."""

    name: str
    field: str
    schema: dict[str, Any]
    """The JSON schema of its arguments."""
    strict: bool = False
    """Whether arguments must follow the schema even if the model is free to call the function or not."""

    def function(self, *, loose: bool = False) -> Function:
        """The Function for a grammar. If it is not strict, its schema is the nearest wider one that can be enforced;
        with `loose`, that of any object."""
        if not self.strict:
            return Function(self.name, ANY_OBJECT if loose else widened(ANY_OBJECT | self.schema)[0])
        return Function(self.name, ANY_OBJECT | self.schema)

    @property
    def unenforced(self) -> list[str]:
        """JSON pointers to the keywords of the schema that `function` leaves out."""
        return [] if self.strict else [f"{self.field}.parameters{at}" for at in widened(ANY_OBJECT | self.schema)[1]]


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
    tools: list[dict[str, Any]], place: str, read: Callable[[str, dict[str, Any]], Tool | None]
) -> tuple[Tool, ...]:
    """All tools of a request. `read` parses one, given its field (`place` with its number); None leaves it out. Names
    must differ."""
    if len(tools) > MAX_TOOLS:
        refuse("tools", f"at most {MAX_TOOLS} tools")
    found: dict[str, Tool] = {}
    for i, tool in enumerate(tools):
        if (one := read(place.format(i), tool)) is None:
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
    schema = function.get("parameters")
    if schema is not None:
        check_parameters(f"{field}.parameters", schema)
    return Tool(name, field, schema or ANY_OBJECT, bool(function.get("strict")))


# ---------------------------------------------------------------- JSON schemas


def check_parameters(field: str, schema: Any) -> None:
    """Raise FieldError unless `schema` has the form of a JSON schema of an object."""
    if not isinstance(schema, dict):
        refuse(field, "must be the JSON schema of an object")
    if schema.get("type", "object") != "object":
        refuse(f"{field}.type", f"must be 'object', not {schema['type']!r}")
    _check_schema(field, schema, MAX_DEPTH)


def _check_schema(field: str, schema: Any, depth: int) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        refuse(field, "must be a JSON schema")
    if not depth:
        refuse(field, f"schemas may be nested {MAX_DEPTH} deep")
    kinds = schema.get("type")
    for kind in kinds if isinstance(kinds, list) else () if kinds is None else (kinds,):
        if kind not in TYPES:
            refuse(f"{field}.type", f"must be of {', '.join(TYPES)}, not {kind!r}")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        refuse(f"{field}.required", "must be a list of names")
    if not isinstance(schema.get("enum", []), list):
        refuse(f"{field}.enum", "must be a list")
    for path, part in _parts(field, schema):
        _check_schema(path, part, depth - 1)


def _parts(field: str, schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas within a schema, each with its field."""
    for key in ("properties", "$defs", "definitions", "patternProperties"):
        many = schema.get(key, {})
        if not isinstance(many, dict):
            refuse(f"{field}.{key}", "must be an object of schemas")
        yield from ((f"{field}.{key}.{name}", part) for name, part in many.items())
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        many = schema.get(key, [])
        if not isinstance(many, list):
            refuse(f"{field}.{key}", "must be a list of schemas")
        yield from ((f"{field}.{key}[{i}]", part) for i, part in enumerate(many))
    for key in ("items", "additionalProperties", "not"):
        if key in schema and not isinstance(schema[key], list):
            yield f"{field}.{key}", schema[key]
