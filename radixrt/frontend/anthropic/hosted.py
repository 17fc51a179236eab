"""Converts blocks of tools that Anthropic ran to function calls and their results, so that a conversation that was
begun there can be continued here. Every error names the field.

server_tool_use, mcp_tool_use                  -> a call, put where its result is, which may come much later, or never
web_search_tool_result, mcp_tool_result, ...   -> its result: a text, or JSON without what only Anthropic can read
tool_search_tool_result                        -> its result: the tools that it has found, if these are deferred
mcp_tool_listing, fallback                     -> nothing: all tools are shown here
"""

from __future__ import annotations

from typing import Any

from radixrt.formats.tools import flat_name
from radixrt.frontend.anthropic.blocks import (
    CHANGE,
    ERROR,
    Block,
    checked_kind,
    is_text,
    result_content,
    string,
    text_of,
    to_json,
)
from radixrt.frontend.anthropic.references import References
from radixrt.frontend.anthropic.tools import template_id
from radixrt.frontend.generate.media import media_kind, placeholder
from radixrt.frontend.http.errors import refuse

CALLS = ("server_tool_use", "mcp_tool_use")
RESULTS = (
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "advisor_tool_result",
    "mcp_tool_result",
)
NOTHING = ("mcp_tool_listing", "fallback")
"""Blocks without content for a model."""
ENCRYPTED = "encrypted"
"""The beginning of keys whose values only Anthropic can read."""
Pair = tuple[dict[str, Any], dict[str, Any]]


class Hosted:
    """The calls of a history that wait for their results. `changed` is a block (by identity) that is made longer."""

    def __init__(self, references: References, changed: Block | None = None) -> None:
        self._references = references
        self._changed = changed
        self._waiting: dict[str, dict[str, Any]] = {}
        """Functions with their arguments, by call id."""

    def call(self, field: str, block: Block) -> None:
        """Add a call, which appears in the history only together with its result."""
        shown, name = string(field, block, "id"), string(field, block, "name")
        if block["type"] == "mcp_tool_use":
            name = flat_name(string(field, block, "server_name"), name)
        if not isinstance(block.get("input"), dict):
            refuse(f"{field}.input", "must be an object")
        if shown in self._waiting:
            refuse(f"{field}.id", f"there are two {block['type']} blocks {shown!r} without their results")
        given = block["input"] | ({CHANGE: CHANGE} if block is self._changed else {})
        self._waiting[shown] = {"name": name, "arguments": to_json(f"{field}.input", given)}

    def result(self, field: str, block: Block) -> Pair | None:
        """Returns (the call, the message of its result); None if the result has no content for a model."""
        shown = string(field, block, "tool_use_id")
        if shown not in self._waiting:
            refuse(f"{field}.tool_use_id", f"no block before this one is a call {shown!r} without its result")
        function, said = self._waiting.pop(shown), self._said(field, block)
        if said is None:
            return None
        told = {"role": "tool", "tool_call_id": template_id(shown), "name": function["name"], "content": said}
        return {"id": template_id(shown), "type": "function", "function": function}, told

    def _said(self, field: str, block: Block) -> str | list[Block] | None:
        if block["type"] == "mcp_tool_result":
            return result_content(field, block, self._changed, self._references.expanded)
        content, place = block.get("content"), f"{field}.content"
        searched = isinstance(content, dict) and content.get("type") == "tool_search_tool_search_result"
        said = self._references.hidden(place, content) if searched else _content(place, content)
        return said + CHANGE if said is not None and block is self._changed else said


def _content(field: str, content: Any) -> str:
    """The text of a result's content for a model."""
    objects = content if isinstance(content, list) else [content]
    if not all(isinstance(one, dict) for one in objects):
        refuse(field, "must be an object, or a list of objects")
    kind = content.get("type") if isinstance(content, dict) else None
    if isinstance(kind, str) and kind.endswith("_error"):
        return ERROR + string(field, content, "error_code")
    match kind:
        case "web_fetch_result":
            return _page(field, content)
        case "text_editor_code_execution_view_result" if content.get("file_type") in ("image", "pdf"):
            return placeholder(content["file_type"])
    return _readable(field, content)


def _page(field: str, content: Block) -> str:
    """The text of a fetched page, after its address."""
    document = content.get("content")
    if not isinstance(document, dict):
        refuse(f"{field}.content", "must be a document")
    checked_kind(f"{field}.content", document, ("text",))
    return f"{string(field, content, 'url')}\n{text_of(f'{field}.content', document, None)}"


def _readable(field: str, content: Any) -> str:
    try:
        bare = _bare(content)
        if not _tells(bare) and _tells(content):
            refuse(field, "is encrypted, and cannot be read here")
    except RecursionError:
        refuse(field, "is nested too deeply")
    return to_json(field, bare, compact=True)


def _bare(value: Any) -> Any:
    """A value without null and encrypted parts; images are named."""
    if isinstance(value, list):
        return [_bare(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if (kind := media_kind(value)) and not is_text(value):
        return {"type": "text", "text": placeholder(kind)}
    return {key: _bare(value[key]) for key in value if value[key] is not None and not key.startswith(ENCRYPTED)}


def _tells(value: Any) -> bool:
    """Whether a value has anything beside its type."""
    if isinstance(value, list):
        return any(map(_tells, value))
    if isinstance(value, dict):
        return any(_tells(inner) for key, inner in value.items() if key != "type")
    return value is not None
