"""Tools that Anthropic defines and the client runs, as functions that any model can call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Defined:
    """The function of a tool."""

    name: str
    description: str
    schema: dict[str, Any]
    """The JSON schema of its arguments."""


_ARGUMENTS: dict[str, dict[str, Any]] = {
    "path": {"type": "string", "description": "Of the file or directory; of any command but rename."},
    "view_range": {
        "type": "array",
        "items": {"type": "integer"},
        "minItems": 2,
        "maxItems": 2,
        "description": "view: the first and the last line to show, counted from 1; -1 is the end of the file.",
    },
    "file_text": {"type": "string", "description": "create: all that the file is to hold."},
    "old_str": {"type": "string", "description": "str_replace: the text to replace, which the file must hold once."},
    "new_str": {"type": "string", "description": "str_replace: the text to put in its place."},
    "insert_line": {"type": "integer", "description": "insert: the line to insert behind; 0 is the start of the file."},
    "insert_text": {"type": "string", "description": "insert: the text to insert."},
    "old_path": {"type": "string", "description": "rename: the path as it is."},
    "new_path": {"type": "string", "description": "rename: the path as it is to be."},
}
_ANY_PATH = {"path": {"type": "string", "description": "Of the file or directory."}}
_NEW_STR = {"new_str": {"type": "string", "description": "str_replace: the new text; insert: the text to insert."}}
_VIEWED = "view shows a file with its lines numbered, or what a directory holds;"
_CHANGED = (
    "create writes a file; str_replace replaces a text that a file holds exactly once, white space included; "
    "insert puts a text behind a line"
)
_UNDO = "; undo_edit takes back the last edit of a file"


def _commands(commands: str, arguments: str, required: tuple[str, ...] = (), **own: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool with several commands. `own` are arguments that differ from those of the same name in other
    tools."""
    command = {"type": "string", "enum": commands.split(), "description": "What to do."}
    properties = {name: own.get(name, _ARGUMENTS[name]) for name in arguments.split()}
    return {
        "type": "object",
        "properties": {"command": command} | properties,
        "required": ["command", *required],
    }


_BASH = Defined(
    "bash",
    "Run a command in a shell that stays as the command before has left it: its directory, variables and files.",
    {
        "type": "object",
        "properties": {
            "command": {"type": "string", "description": "The command; needed unless the shell is to be restarted."},
            "restart": {"type": "boolean", "description": "Whether to start the shell anew instead."},
        },
    },
)
_OLD_ARGUMENTS = "path view_range file_text old_str new_str insert_line"
_EDITOR_2024 = Defined(
    "str_replace_editor",
    f"View, create and edit text files: {_VIEWED} {_CHANGED}{_UNDO}.",
    _commands("view create str_replace insert undo_edit", _OLD_ARGUMENTS, ("path",), **_ANY_PATH, **_NEW_STR),
)
_EDITOR_4 = Defined(
    "str_replace_based_edit_tool",
    f"View, create and edit text files: {_VIEWED} {_CHANGED}.",
    _commands("view create str_replace insert", _OLD_ARGUMENTS, ("path",), **_ANY_PATH, **_NEW_STR),
)
# For 20250728 the documentation had new_str until 2026, and now has insert_text, which its models write.
_EDITOR = Defined(
    _EDITOR_4.name,
    _EDITOR_4.description,
    _commands("view create str_replace insert", f"{_OLD_ARGUMENTS} insert_text", ("path",), **_ANY_PATH),
)
_MEMORY = Defined(
    "memory",
    "Keep notes in files under /memories, which stay when the conversation is over; look there before a task is begun: "
    f"{_VIEWED} {_CHANGED}; delete removes a file or directory; rename moves one.",
    _commands("view create str_replace insert delete rename", f"{_OLD_ARGUMENTS} insert_text old_path new_path"),
)

DEFINED: dict[str, Defined] = {
    "bash_20241022": _BASH,
    "bash_20250124": _BASH,
    "text_editor_20241022": _EDITOR_2024,
    "text_editor_20250124": _EDITOR_2024,
    "text_editor_20250429": _EDITOR_4,
    "text_editor_20250728": _EDITOR,
    "memory_20250818": _MEMORY,
}
"""By the kind of tool."""
