"""What xgrammar says of a grammar that it does not take, for whoever wrote that."""

from __future__ import annotations

import re

MAX_CHARS = 500


def plain(text: str) -> str:
    """xgrammar's message without the time, the place in its source, and the text that it was given."""
    text = re.sub(r"\[\d\d:\d\d:\d\d\] \S+?:\d+: ", "", text)
    text = re.sub(r"Check failed: \(.*?\) is false: ", "", text)
    text = text.partition(" The JSON string is:")[0]
    return " ".join(text.split())[:MAX_CHARS]


def explained(error: Exception) -> str:
    """The `plain` message of an exception of xgrammar; if it has none, what it was."""
    return plain(str(error)) or f"it cannot be compiled, and xgrammar does not say why ({type(error).__name__})"
