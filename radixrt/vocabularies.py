"""How tokenizers spell their tokens in a vocabulary: what reads text from ids, and what compiles grammars, agree."""

from __future__ import annotations

import re

SPACE = "\u2581"
"""A space, as sentencepiece writes it."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A token that is one byte, in a vocabulary of text."""


def byte_level_bytes(token: str) -> bytes:
    """What a token of GPT-2's alphabet stands for; one with a character outside of it (an added one) is its own text,
    whole."""
    return bytes(map(_BYTES.get, token)) if all(c in _BYTES for c in token) else token.encode()


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 and up, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


_BYTES = _byte_of_char()
