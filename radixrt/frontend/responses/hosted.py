"""Converts items of tools that OpenAI runs, or that have a special form, to function calls and their results, so that a
conversation that was begun there can be continued here. Every error names the field.

custom_tool_call, local_shell_call, shell_call, ...   -> a call; its output is an item of its own
web_search_call, file_search_call, mcp_call, ...      -> a call and its result; nothing if the item has no result
mcp_list_tools                                        -> nothing: it lists which tools there were
computer_call, compaction, ...                        -> refused: screens, and what only OpenAI can read
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from radixrt.formats.tools import flat_name
from radixrt.frontend.generate.arguments import arguments_text
from radixrt.frontend.generate.media import placeholder
from radixrt.frontend.http.errors import refuse
from radixrt.frontend.responses.search import search_arguments, search_output
from radixrt.frontend.responses.tools import SEARCH

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function: `arguments` as JSON, `result` as text."""

    name: str
    arguments: str
    result: str = ""


def error(text: str) -> str:
    """The text of a result that is an error; chat templates have no other way to show that."""
    return f"Error: {text}"


# ---------------------------------------------------------------- calls whose outputs are items


def _function(field: str, item: Item) -> Call:
    name = _name(field, item)
    return Call(name, arguments_text(f"{field}.arguments", item.get("arguments")))


def _name(field: str, item: Item) -> str:
    """The name of a function for the model."""
    name = string(field, item, "name", empty=False)
    if not isinstance(item.get("namespace"), str | None):
        refuse(f"{field}.namespace", "must be a string")
    return flat_name(item.get("namespace"), name)


def _custom(field: str, item: Item) -> Call:
    """A call of a custom tool, whose input is any text."""
    return Call(_name(field, item), _json(field, {"input": string(field, item, "input")}))


def _local_shell(field: str, item: Item) -> Call:
    return Call("local_shell", _json(field, _object(field, item, "action")))


def _shell(field: str, item: Item) -> Call:
    return Call("shell", _json(field, _object(field, item, "action")))


def _apply_patch(field: str, item: Item) -> Call:
    return Call("apply_patch", _json(field, _object(field, item, "operation")))


def _program(field: str, item: Item) -> Call:
    return Call("program", _json(field, {"code": string(field, item, "code")}))


CALLS: dict[str, Callable[[str, Item], Call]] = {
    "function_call": _function,
    "custom_tool_call": _custom,
    "local_shell_call": _local_shell,
    "shell_call": _shell,
    "apply_patch_call": _apply_patch,
    "program": _program,
    "tool_search_call": lambda field, item: Call(SEARCH, search_arguments(field, item)),
}
"""By the kind of item; each has a `call_id`."""


def _shell_output(field: str, item: Item) -> str:
    return _json(field, _objects(field, item, "output"))


def _patch_output(field: str, item: Item) -> str:
    status = string(field, item, "status")
    return f"{status}: {string(field, item, 'output')}" if item.get("output") else status


OUTPUTS: dict[str, Callable[[str, Item], str]] = {
    "local_shell_call_output": lambda field, item: string(field, item, "output"),
    "shell_call_output": _shell_output,
    "apply_patch_call_output": _patch_output,
    "program_output": lambda field, item: string(field, item, "result"),
    "tool_search_output": search_output,
}
"""By the kind of item. Each has the `call_id` of its call; a local shell's output has it as its `id`, or has the `id`
of the call's item there."""


# ---------------------------------------------------------------- calls that have their results


def _web_search(field: str, item: Item) -> Call | None:
    """A web search. Its result is only a list of addresses, if the client has requested these."""
    action = _object(field, item, "action") if item.get("action") is not None else {}
    if action.get("sources") is None:
        return None
    found = _objects(f"{field}.action", action, "sources")
    return Call("web_search", _json(field, action | {"sources": None}), _json(field, found))


def _file_search(field: str, item: Item) -> Call | None:
    if item.get("results") is None:
        return None
    found = _objects(field, item, "results")
    return Call("file_search", _json(field, {"queries": item.get("queries")}), _json(field, found))


def _code_interpreter(field: str, item: Item) -> Call | None:
    if item.get("code") is None or item.get("outputs") is None:
        return None
    logs = []
    for i, output in enumerate(_objects(field, item, "outputs")):
        if output.get("type") not in ("logs", "image"):
            refuse(f"{field}.outputs[{i}].type", f"{output.get('type')!r} is not served, only logs are")
        is_image = output["type"] == "image"
        logs.append(placeholder("image") if is_image else string(f"{field}.outputs[{i}]", output, "logs"))
    return Call("code_interpreter", _json(field, {"code": string(field, item, "code")}), "".join(logs))


def _mcp(field: str, item: Item) -> Call | None:
    problem = item.get("error")
    if problem is None and item.get("output") is None:
        return None
    call = _function(field, item)
    if problem is None:
        return Call(call.name, call.arguments, string(field, item, "output"))
    said = (problem.get("message") or problem.get("content")) if isinstance(problem, dict) else problem
    return Call(call.name, call.arguments, error(said if isinstance(said, str) else _json(field, said)))


def _image(field: str, item: Item) -> Call | None:
    if item.get("result") is None:
        return None
    return Call("image_generation", _json(field, {"prompt": item.get("revised_prompt")}), placeholder("image"))


def _nothing(field: str, item: Item) -> None:
    """An item without content for a model."""


WHOLE: dict[str, Callable[[str, Item], Call | None]] = {
    "web_search_call": _web_search,
    "file_search_call": _file_search,
    "code_interpreter_call": _code_interpreter,
    "mcp_call": _mcp,
    "mcp_list_tools": _nothing,
    "image_generation_call": _image,
}
"""By the kind of item; the functions return None if there is no result."""

_NO_IMAGES = "its screenshots are not served: this model reads text only"
REFUSED = {
    "computer_call": ("type", _NO_IMAGES),
    "computer_call_output": ("output", _NO_IMAGES),
    "compaction": ("encrypted_content", "cannot be read here"),
    "additional_tools": ("tools", "tools within a conversation are not served; send them as tools"),
    "configuration_update": ("type", "settings within a conversation are not served; send them with the request"),
}
"""By the kind of item: the field, and the reason why it is refused."""


# ---------------------------------------------------------------- fields


def string(field: str, item: Item, name: str, *, empty: bool = True) -> str:
    """A string field of an item. Raises ApiError (400) if it is not a string."""
    if not isinstance(item.get(name), str) or not (item[name] or empty):
        refuse(f"{field}.{name}", "must be a string" + ("" if empty else " that is not empty"))
    return item[name]


def _object(field: str, item: Item, name: str) -> Item:
    if not isinstance(item.get(name), dict):
        refuse(f"{field}.{name}", "must be an object")
    return item[name]


def _objects(field: str, item: Item, name: str) -> list[Item]:
    found = item.get(name)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        refuse(f"{field}.{name}", "must be a list of objects")
    return found


def _json(field: str, value: Any) -> str:
    """JSON without null values, which clients fill in."""
    try:
        return json.dumps(_bare(value), ensure_ascii=False)
    except RecursionError:
        refuse(field, "is nested too deeply")


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _bare(inner) for key, inner in value.items() if inner is not None}
    return [_bare(inner) for inner in value] if isinstance(value, list) else value
