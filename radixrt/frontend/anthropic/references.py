"""`tool_reference` blocks in results: they become the definitions of the tools that they name, at that place."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from radixrt.formats.deferred import definition, found_text
from radixrt.frontend.anthropic.blocks import CHANGE, Block, string
from radixrt.frontend.anthropic.tools import served, shown_tool, visible
from radixrt.frontend.http.errors import refuse

Part = tuple[str, Block]
"""A block with its field."""


class References:
    """The tools of a validated request, by name. `changed` is a block (by identity) that is made longer."""

    def __init__(self, tools: list[dict[str, Any]] | None = None, changed: Block | None = None) -> None:
        self._changed = changed
        self._tools = {(shown := shown_tool(tool))["function"]["name"]: shown for tool in served(tools)}
        self._visible = {shown_tool(tool)["function"]["name"] for tool in visible(tools)}

    def expanded(self, parts: list[Part]) -> list[Part]:
        """The parts of a result; consecutive references are one text, since templates join texts in different ways."""
        found: list[Part] = []
        for referring, group in groupby(parts, key=lambda part: part[1].get("type") == "tool_reference"):
            run = [*group]
            found += [(run[0][0], {"type": "text", "text": self._text(run)})] if referring else run
        return found

    def hidden(self, field: str, content: Any) -> str | None:
        """The text of what a search of Anthropic's has found; None if all of it is in the list of tools anyway."""
        blocks = content.get("tool_references")
        if not isinstance(blocks, list) or not all(isinstance(one, dict) for one in blocks):
            refuse(f"{field}.tool_references", "must be a list of objects")
        parts = [(f"{field}.tool_references.{i}", block) for i, block in enumerate(blocks)]
        names = {string(place, block, "tool_name") for place, block in parts} & self._tools.keys()
        return self._text(parts) if names - self._visible else None

    def _text(self, parts: list[Part]) -> str:
        return found_text([self._told(field, block) for field, block in parts])

    def _told(self, field: str, block: Block) -> str:
        name = string(field, block, "tool_name")
        # Servers of tools come and go within a session, which goes on without them.
        told = definition(field, self._tools[name]) if name in self._tools else f"{name}: is not available any more"
        return told + CHANGE if block is self._changed else told
