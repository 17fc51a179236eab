"""Images, sounds and files, of which a model of text sees nothing. Where a user asks about one, the request is refused.
Elsewhere, as in the results of tools, it is named in its place: a history that holds one could never go on otherwise.
"""

from __future__ import annotations

from typing import Any

KINDS = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
    "video": "video",
    "video_url": "video",
    "document": "document",
    "file": "file",
    "input_file": "file",
}
"""What a part holds, by its type in any of the APIs."""
SYSTEM = ("system", "developer")
"""The roles of instructions."""


def media_kind(part: Any) -> str | None:
    """What a part of a content holds, if it is none of text."""
    kind = part.get("type") if isinstance(part, dict) else None
    return KINDS.get(kind) if isinstance(kind, str) else None


def placeholder(kind: str) -> str:
    """The text in the place of an image, a file or a sound."""
    return f"[{kind}: this model reads text only]"


def asking(roles: list[Any]) -> int | None:
    """The index of the user's newest message, if it is a question that has no answer yet: not one that an agent has put
    after a tool's result, to show what the tool has read. An assistant's message at the end is the beginning of the
    answer."""
    begun = int(roles[-1:] == ["assistant"])
    said = [i for i, role in enumerate(roles[: len(roles) - begun]) if role not in SYSTEM]
    if not said or roles[said[-1]] != "user" or roles[said[-2:][0]] == "tool":
        return None
    return said[-1]
