"""Patterns of JSON schemas, made fit for a grammar of JSON.

xgrammar puts a `pattern` between quotes as it is: where it lets any character stand (`.`, `[^a]`, `\\S`), a raw quote
or line break could, and what came out would be no JSON. Those are left out here; what is written out as a quote or a
backslash is escaped.
"""

from __future__ import annotations

import json
import re
from typing import Any

VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are data, not schemas."""
UNSAFE = r"\"\\\n\r"
"""Within a class of characters."""
PIECE = re.compile(
    r"""(?P<escape>\\.)            # outside of a class
      | (?P<any>\.)
      | (?P<quote>")
      | (?P<negated>\[\^)
      | (?P<set>\[(?:\\.|[^\]\\])*\]?)""",
    re.VERBOSE | re.DOTALL,
)


def with_safe_patterns(kind: str, text: str) -> str:
    """The text of a json_schema or structural_tag, its patterns as `safe_pattern` makes them."""
    if '"pattern"' not in text:
        return text
    value = json.loads(text)
    return json.dumps(_schema(value) if kind == "json_schema" else _tag(value), ensure_ascii=False)


def _schema(value: Any) -> Any:
    if isinstance(value, list):
        return [_schema(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    changed = {key: inner if key in VALUES else _schema(inner) for key, inner in value.items()}
    if isinstance(pattern := value.get("pattern"), str):
        changed["pattern"] = safe_pattern(pattern)
    return changed


def _tag(value: Any) -> Any:
    """A structural tag has patterns of its own, of free text: only schemas within are changed."""
    if isinstance(value, list):
        return [_tag(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    return {key: _schema(inner) if key == "json_schema" else _tag(inner) for key, inner in value.items()}


def safe_pattern(pattern: str) -> str:
    """The pattern of what stands between the quotes of a JSON string, less what would have to be escaped there."""
    found, at = [], 0
    while match := PIECE.search(pattern, at):
        found += [pattern[at : match.start()], _safe(match)]
        at = match.end()
        if match.lastgroup == "negated":
            inside = re.compile(r"(?:\\.|[^\]\\])*\]?", re.DOTALL).match(pattern, at)
            found.append(inside[0])
            at = inside.end()
    return "".join(found) + pattern[at:]


def _safe(match: re.Match[str]) -> str:
    piece = match[0]
    match match.lastgroup:
        case "any":
            return f"[^{UNSAFE}]"
        case "negated":
            return f"[^{UNSAFE}"
        case "quote":
            return r"\\" + '"'
        case "escape":
            named = {r"\S": rf"[^{UNSAFE}\s]", r"\D": rf"[^{UNSAFE}\d]", r"\W": rf"[^{UNSAFE}\w]"}
            return named.get(piece, {r"\\": r"\\\\", r"\"": r"\\" + '"'}.get(piece, piece))
    return piece
