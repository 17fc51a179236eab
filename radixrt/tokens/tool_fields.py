"""Optional fields of tools that some chat templates cannot do without."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

Schema = dict[str, Any]
NO_PARAMETERS: Schema = {"type": "object", "properties": {}}


def _tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "bash", **function}}


def _taking(schema: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"command": schema}, "required": ["command"]}
    return _tool(description="run", parameters=parameters)


TOOL = _taking({"type": "string", "description": "what"})
"""A tool that has all fields."""


def _described(function: Schema) -> Schema:
    return {"description": "", **function}


def _with_parameters(function: Schema) -> Schema:
    return {**function, "parameters": function.get("parameters") or NO_PARAMETERS}


def _with_properties(function: Schema) -> Schema:
    return {**function, "parameters": NO_PARAMETERS | (function.get("parameters") or {})}


def _each_described(schema: Any) -> Any:
    return {"description": "", **schema} if isinstance(schema, dict) else schema


def _no_booleans(schema: Any) -> Any:
    return {} if isinstance(schema, bool) else schema


def _one_type(schema: Any) -> Any:
    """A schema with several types as one of several schemas."""
    kinds = schema.get("type") if isinstance(schema, dict) else None
    if not isinstance(kinds, list):
        return schema
    rest = {key: value for key, value in schema.items() if key != "type"}
    return rest | {"anyOf": [{"type": kind} for kind in kinds]}


def _open(schema: Any) -> Any:
    is_object = isinstance(schema, dict) and schema.get("type") == "object"
    return {"properties": {}, "additionalProperties": {}, **schema} if is_object else schema


_TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
_READ: dict[str, Callable[[Any], bool]] = {
    "type": lambda x: all(isinstance(kind, str) and kind in _TYPES for kind in (x if isinstance(x, list) else [x])),
    "description": lambda x: isinstance(x, str),
    "properties": lambda x: isinstance(x, dict),
    "required": lambda x: isinstance(x, list),
    "enum": lambda x: isinstance(x, list),
    "items": lambda x: isinstance(x, dict | bool | list),
    "additionalProperties": lambda x: isinstance(x, dict | bool),
    "anyOf": lambda x: isinstance(x, list),
    "oneOf": lambda x: isinstance(x, list),
    "allOf": lambda x: isinstance(x, list),
}
"""Which values of keywords that templates read are those of JSON Schema."""


def _well_formed(schema: Any) -> Any:
    """A schema without keywords whose values are none of theirs; {} for what is no schema."""
    if isinstance(schema, bool):
        return schema
    kept = schema.items() if isinstance(schema, dict) else ()
    return {key: value for key, value in kept if key not in _READ or _READ[key](value)}


def _everywhere(change: Callable[[Any], Any], itself: bool = False) -> Callable[[Schema], Schema]:
    """A change of the schemas of all parameters, and of those within them; `itself`: of the whole schema as well."""

    def changed(schema: Any) -> Any:
        if isinstance(found := change(schema), dict):
            return within(found)
        return found

    def within(schema: Schema) -> Schema:
        found = dict(schema)
        if isinstance(found.get("properties"), dict):
            found["properties"] = {name: changed(one) for name, one in found["properties"].items()}
        for key in ("items", "additionalProperties"):
            if isinstance(found.get(key), dict):
                found[key] = changed(found[key])
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(found.get(key), list):
                found[key] = [changed(one) for one in found[key]]
        return found

    def of_function(function: Schema) -> Schema:
        parameters = function.get("parameters")
        if not isinstance(parameters, dict):
            return function
        return {**function, "parameters": (changed if itself else within)(parameters)}

    return of_function


MALFORMED: tuple[Any, ...] = (
    {"type": "float", "description": None, "enum": None, "required": True},
    {"type": "array", "description": 3, "items": None},
    {"type": "object", "description": "what", "properties": [{}], "required": None, "oneOf": None},
    "string",
)
_LISTED: Schema = {"type": "object", "properties": [{"name": "command", "type": "string"}]}
"""Schemas as some clients send them."""


def _malformed() -> dict[str, Any]:
    properties = {f"argument{i}": schema for i, schema in enumerate(MALFORMED)}
    return _tool(description="run", parameters={"type": "object", "properties": properties, "required": None})


OPTIONAL: dict[str, tuple[dict[str, Any], Callable[[Schema], Schema]]] = {
    "well-formed": (_malformed(), _everywhere(_well_formed, itself=True)),
    "named properties": (_tool(description="run", parameters=_LISTED), _everywhere(_well_formed, itself=True)),
    "description": (_tool(parameters=TOOL["function"]["parameters"]), _described),
    "parameters": (_tool(description="run"), _with_parameters),
    "properties": (_tool(description="run", parameters={}), _with_properties),
    "booleans": (_taking(True), _everywhere(_no_booleans)),
    "types": (_taking({"type": ["string", "null"], "description": "what"}), _everywhere(_one_type)),
    "open objects": (_taking({"type": "object", "description": "what"}), _everywhere(_open)),
    "descriptions": (_taking({"type": "array", "items": {"type": "string"}}), _everywhere(_each_described)),
}
"""By name: a tool without the field, and what adds it to a function."""


def with_fields(tools: list[dict[str, Any]], needed: Collection[str]) -> list[dict[str, Any]]:
    """Tools without fields that are null, and with those that are `needed`, empty."""
    changes = [change for name, (_, change) in OPTIONAL.items() if name in needed]
    return [_changed(tool, changes) for tool in tools]


def _changed(tool: dict[str, Any], changes: list[Callable[[Schema], Schema]]) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return tool
    if changes or None in function.values():
        function = {key: value for key, value in function.items() if value is not None}
    for change in changes:
        function = change(function)
    return tool if function is tool["function"] else {**tool, "function": function}
