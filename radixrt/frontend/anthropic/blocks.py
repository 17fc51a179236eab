"""Validates the blocks of a content, and converts them to text. Every error names the field."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from radixrt.frontend.generate.media import media_kind, placeholder
from radixrt.frontend.http.errors import refuse

Block = dict[str, Any]
Expanded = Callable[[list[tuple[str, Block]]], list[tuple[str, Block]]]
CHANGE = "\ufdd0"
"""A noncharacter, which no text contains; appended to a block to find where the prompt changes."""
ERROR = "Error: "
"""The beginning of a result that is an error; chat templates have no other way to show that."""
BILLING = "x-anthropic-billing-header:"
"""The beginning of a line that Claude Code puts before its instructions. It is for Anthropic's accounts, and has a hash
that may change with each request: as a part of a prompt it would leave nothing to hit."""


def blocks(field: str, content: Any) -> Iterator[tuple[str, Block]]:
    """The blocks of a content, each with its field. A plain string is one block."""
    if isinstance(content, str):
        yield field, {"type": "text", "text": content}
        return
    if not isinstance(content, list):
        refuse(field, "must be a text or a list of blocks")
    for i, block in enumerate(content):
        if not isinstance(block, dict):
            refuse(f"{field}.{i}", "must be an object with a type")
        yield f"{field}.{i}", block


def checked_kind(field: str, block: Block, kinds: tuple[str, ...]) -> str:
    """The type of a block, one of `kinds`; "text" also for documents, images, and search results."""
    kind = block.get("type")
    if is_text(block) or media_kind(block):
        return "text"
    if kind not in kinds:
        refuse(f"{field}.type", f"must be one of {', '.join(kinds)} here, not {kind!r}")
    return kind


def string(field: str, block: Block, name: str) -> str:
    """A string field of a block."""
    if not isinstance(block.get(name), str):
        refuse(f"{field}.{name}", "must be a string")
    return block[name]


def text_of(field: str, block: Block, changed: Block | None) -> str:
    """The text of a block, an image is named; with CHANGE appended, if it is `changed`."""
    text = _document(field, block) if is_text(block) else _plain(field, block)
    return text + CHANGE if block is changed else text


def text_content(parts: list[tuple[str, Block]], changed: Block | None) -> str | list[Block]:
    """The content for a chat template: a string, or a list of several texts, which templates join in different ways."""
    return _joined(_texts(parts, changed))


def system_content(system: str | list[Block], changed: Block | None) -> str | list[Block]:
    """As `text_content`, of the system blocks, without lines that begin with BILLING."""
    texts = []
    for text in _texts([*blocks("system", system)], changed):
        shown = text.partition("\n")[2].lstrip("\n") if text.startswith(BILLING) else text
        if shown or not text:
            texts.append(shown)
    return _joined(texts)


def check_text_only(field: str, content: Any) -> None:
    """Raise ApiError (400) for images, and documents that are not text, also within others."""
    if not isinstance(content, list):
        return
    for path, block in blocks(field, content):
        if not is_text(block):
            if kind := media_kind(block):
                refuse(f"{path}.type", f"{kind} blocks are not served: this model reads text only")
        elif block["type"] == "search_result":
            check_text_only(f"{path}.content", block.get("content"))
        else:
            check_text_only(f"{path}.source.content", block["source"].get("content"))


def result_content(field: str, block: Block, changed: Block | None, expanded: Expanded) -> str | list[Block]:
    """The text of a tool result; `expanded` makes texts of references to tools that a search has found."""
    content = block.get("content")
    parts = [*blocks(f"{field}.content", content)] if content is not None else []
    said = text_content(expanded(parts), changed)
    if block is changed:
        said = _longer(said)
    if not isinstance(block.get("is_error"), bool | None):
        refuse(f"{field}.is_error", "must be true or false")
    return _prefixed(ERROR, said) if block.get("is_error") else said


def is_text(block: Block) -> bool:
    """Whether a block is a document that is text, or a search result."""
    source = block.get("source")
    if block.get("type") == "document":
        return isinstance(source, dict) and source.get("type") in ("text", "content")
    return block.get("type") == "search_result"


def _document(field: str, block: Block) -> str:
    """The text of a document or search result, after its title and other metadata."""
    about = [string(field, block, name) for name in ("title", "context", "source") if isinstance(block.get(name), str)]
    place, content = f"{field}.content", block.get("content")
    if block["type"] == "document":
        name = "data" if block["source"]["type"] == "text" else "content"
        place, content = f"{field}.source.{name}", block["source"].get(name)
    texts = []
    for path, part in blocks(place, content):
        checked_kind(path, part, ("text",))
        texts.append(_plain(path, part))
    return "\n".join([*about, *texts])


def _plain(field: str, block: Block) -> str:
    kind = media_kind(block)
    return placeholder(kind) if kind else string(field, block, "text")


def _texts(parts: list[tuple[str, Block]], changed: Block | None) -> list[str]:
    for field, part in parts:
        checked_kind(field, part, ("text",))
    return [text_of(field, part, changed) for field, part in parts]


def _joined(texts: list[str]) -> str | list[Block]:
    return "".join(texts) if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]


def _longer(content: str | list[Block]) -> str | list[Block]:
    if isinstance(content, str):
        return content + CHANGE
    return [*content[:-1], content[-1] | {"text": content[-1]["text"] + CHANGE}]


def _prefixed(prefix: str, content: str | list[Block]) -> str | list[Block]:
    if isinstance(content, str):
        return prefix + content
    return [content[0] | {"text": prefix + content[0]["text"]}, *content[1:]]


def to_json(field: str, value: Any, *, compact: bool = False) -> str:
    """Serialize to JSON. Raises ApiError (400) for values that are nested too deeply."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":") if compact else None)
    except RecursionError:
        refuse(field, "is nested too deeply")
