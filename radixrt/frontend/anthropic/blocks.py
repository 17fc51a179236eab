"""Blocks of a content, checked and read as text. Every refusal names the field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from radixrt.frontend.errors import refuse

Block = dict[str, Any]
CHANGE = "\ufdd0"
"""A noncharacter, which no text has: what is put behind a block to see where the prompt changes."""
ERROR = "Error: "
"""What a result that is an error begins with: templates have no other way to say so."""


def blocks(field: str, content: Any) -> Iterator[tuple[str, Block]]:
    """The blocks of a content, each with its field; a text is one block."""
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
    """The type of a block, one of `kinds`: "text" also of a document that is text, and of a search result."""
    kind = block.get("type")
    if "text" in kinds and _is_text(block):
        return "text"
    if kind in ("image", "document"):
        refuse(f"{field}.type", f"{kind} blocks are not served: this model reads text only")
    if kind not in kinds:
        refuse(f"{field}.type", f"must be one of {', '.join(kinds)} here, not {kind!r}")
    return kind


def string(field: str, block: Block, name: str) -> str:
    """What a block has by that name."""
    if not isinstance(block.get(name), str):
        refuse(f"{field}.{name}", "must be a string")
    return block[name]


def text_of(field: str, block: Block, changed: Block | None) -> str:
    """What a block of text says; more, if it is `changed`."""
    text = string(field, block, "text") if block["type"] == "text" else _document(field, block)
    return text + CHANGE if block is changed else text


def text_content(parts: list[tuple[str, Block]], changed: Block | None) -> str | list[Block]:
    """A text, or a list where there are several: templates join them in their own way."""
    for field, part in parts:
        checked_kind(field, part, ("text",))
    texts = [text_of(field, part, changed) for field, part in parts]
    return "".join(texts) if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]


def result_content(field: str, block: Block, changed: Block | None) -> str | list[Block]:
    """What a result says that is text. The names of tools that were searched for tell nothing: all are shown."""
    content = block.get("content")
    parts = [*blocks(f"{field}.content", content)] if content is not None else []
    said = text_content([(path, part) for path, part in parts if part.get("type") != "tool_reference"], changed)
    if block is changed:
        said = _longer(said)
    if not isinstance(block.get("is_error"), bool | None):
        refuse(f"{field}.is_error", "must be true or false")
    return _prefixed(ERROR, said) if block.get("is_error") else said


def _is_text(block: Block) -> bool:
    """Whether it is a document that is text, or a search result."""
    source = block.get("source")
    if block.get("type") == "document":
        return isinstance(source, dict) and source.get("type") in ("text", "content")
    return block.get("type") == "search_result"


def _document(field: str, block: Block) -> str:
    """What a document of text, or a search result, says: behind its title, and what else is told of it."""
    about = [string(field, block, name) for name in ("title", "context", "source") if isinstance(block.get(name), str)]
    place, content = f"{field}.content", block.get("content")
    if block["type"] == "document":
        name = "data" if block["source"]["type"] == "text" else "content"
        place, content = f"{field}.source.{name}", block["source"].get(name)
    texts = []
    for path, part in blocks(place, content):
        checked_kind(path, part, ("text",))
        texts.append(string(path, part, "text"))
    return "\n".join([*about, *texts])


def _longer(content: str | list[Block]) -> str | list[Block]:
    if isinstance(content, str):
        return content + CHANGE
    return [*content[:-1], content[-1] | {"text": content[-1]["text"] + CHANGE}]


def _prefixed(prefix: str, content: str | list[Block]) -> str | list[Block]:
    if isinstance(content, str):
        return prefix + content
    return [content[0] | {"text": prefix + content[0]["text"]}, *content[1:]]


def to_json(field: str, value: Any, *, compact: bool = False) -> str:
    """ApiError (400) for what is nested too deeply."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":") if compact else None)
    except RecursionError:
        refuse(field, "is nested too deeply")
