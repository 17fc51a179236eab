"""`cache_control`: breakpoints, each of which pins the prompt's tokens up to the end of its block for some time.

Only the chat template determines where a block ends in the prompt. Therefore the chat is rendered once more with that
block made longer: the common beginning of both texts is the prefix that does not depend on what follows the block.

    ... user: The whole book.| And its author?<end>
    ... user: The whole book.|<new> And its author?<end>
        --------------------- pinned
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np

from radixrt.formats.tools import ToolUse
from radixrt.frontend.anthropic.blocks import CHANGE, Block, blocks
from radixrt.frontend.anthropic.schema import Counted
from radixrt.frontend.anthropic.tools import visible
from radixrt.frontend.http.errors import one_of, refuse
from radixrt.messages import NO_TENANT, ChatPrompt, Namespace
from radixrt.tokens import Tokenizer

MAX_BREAKPOINTS = 4
SECONDS = {"5m": 300.0, "1h": 3600.0}
BOUNDARY_TOKENS = 4
"""The last tokens of a text that may change when text is appended."""


class Breakpoint(NamedTuple):
    block: Block
    seconds: float


def breakpoints(body: Counted) -> list[Breakpoint]:
    """The breakpoints of a request, in the order of the prompt. Raises ApiError (400) for more than four, or an invalid
    one."""
    found = [Breakpoint(block, _seconds(field, block["cache_control"])) for field, block in _cacheable(body)]
    if body.cache_control is not None:
        seconds = _seconds("", body.cache_control)
        last = _last_block(body)
        if last is not None and last.get("cache_control") is None:
            found.append(Breakpoint(last, seconds))
    if len(found) > MAX_BREAKPOINTS:
        refuse("cache_control", f"at most {MAX_BREAKPOINTS} blocks may have it, not {len(found)}")
    return found


def pinned(
    tokenizer: Tokenizer, body: Counted, use: ToolUse, ids: bytes, namespace: Namespace = NO_TENANT
) -> list[tuple[int, float]]:
    """The pins, (tokens, seconds), of the breakpoints of a request whose prompt is `ids`, shortest first. Texts are
    encoded in `namespace`.

    A block that the template leaves out, or with which the whole prompt changes, has no pin."""
    marked = breakpoints(body)
    if not marked:
        return []
    text = tokenizer.apply_chat(body.prompt(use))
    found = []
    for block, seconds in marked:
        longer = tokenizer.apply_chat(_changed(body, use, block))
        chars = common_length(text, longer)
        if longer != text and (tokens := prefix_tokens(tokenizer, text[:chars], ids, namespace)):
            found.append((tokens, seconds))
    return sorted(found)


def _changed(body: Counted, use: ToolUse, block: Block) -> ChatPrompt:
    """The chat with a block made longer: a tool gets another property, any other block more text."""
    prompt = body.prompt(use, block)
    index = next((i for i, tool in enumerate(visible(body.tools)) if tool is block), None)
    if index is None or not prompt.tools:
        return prompt
    tools = list(prompt.tools)
    function = tools[index]["function"]
    longer = function | {"parameters": function["parameters"] | {CHANGE: CHANGE}}
    tools[index] = tools[index] | {"function": longer}
    return msgspec.structs.replace(prompt, tools=tools)


def common_length(one: str, other: str) -> int:
    """The length of the common prefix, in characters."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


def prefix_tokens(tokenizer: Tokenizer, text: str, ids: bytes, namespace: Namespace = NO_TENANT) -> int:
    """How many of a prompt's `ids` belong to the `text` that it begins with."""
    alone = np.frombuffer(tokenizer.start(text, add_special_tokens=False, namespace=namespace).finish(), "<i4")
    whole = np.frombuffer(ids, "<i4")
    size = min(len(alone), len(whole))
    differ = np.flatnonzero(alone[:size] != whole[:size])
    common = int(differ[0]) if differ.size else size
    if common >= len(alone) - BOUNDARY_TOKENS:
        return common
    # Answers have the ids with which they were generated, not those of their encoded text: compare bytes.
    ends = np.cumsum([len(tokenizer.token_bytes(token)) for token in whole.tolist()])
    return int(np.searchsorted(ends, len(text.encode()), side="right"))


# ---------------------------------------------------------------- where breakpoints are


def _cacheable(body: Counted) -> Iterator[tuple[str, Block]]:
    """Everything that may have a `cache_control`."""
    for field, block in _all_blocks(body):
        if block.get("cache_control") is not None:
            if block.get("type") in ("thinking", "redacted_thinking"):
                refuse(f"{field}.cache_control", "thinking blocks cannot have it")
            yield f"{field}.", block


def _all_blocks(body: Counted) -> Iterator[tuple[str, Block]]:
    """Tools, system blocks and blocks of messages, including those within tool results, but not plain strings."""
    yield from ((f"tools.{i}", tool) for i, tool in enumerate(body.tools or []))
    if isinstance(body.system, list):
        yield from blocks("system", body.system)
    for i, message in enumerate(body.messages):
        if not isinstance(message.get("content"), list):
            continue
        for field, block in blocks(f"messages.{i}.content", message["content"]):
            if block.get("type") in ("tool_result", "mcp_tool_result") and isinstance(block.get("content"), list):
                yield from blocks(f"{field}.content", block["content"])
            yield field, block


def _last_block(body: Counted) -> Block | None:
    """The block that a `cache_control` of the whole request applies to. A plain string becomes a block of its
    message."""
    message = body.messages[-1]
    if isinstance(message["content"], str):
        message["content"] = [{"type": "text", "text": message["content"]}]
    thoughts = ("thinking", "redacted_thinking")
    return next((b for b in reversed(message["content"]) if b.get("type") not in thoughts), None)


def _seconds(field: str, control: Any) -> float:
    field += "cache_control"
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        refuse(f"{field}.type", "must be 'ephemeral'")
    ttl = control.get("ttl") or "5m"
    one_of(ttl, SECONDS, f"{field}.ttl")
    return SECONDS[ttl]
