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


def _everywhere(change: Callable[[Any], Any]) -> Callable[[Schema], Schema]:
    """A change of the schemas of all parameters, and of those within them."""

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
        return {**function, "parameters": within(parameters)} if isinstance(parameters, dict) else function

    return of_function


OPTIONAL: dict[str, tuple[dict[str, Any], Callable[[Schema], Schema]]] = {
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
