"""How vocabularies represent spaces and bytes in tokens; used for detokenization and to compile grammars."""

from __future__ import annotations

import re

SPACE = "\u2581"
"""The character that SentencePiece uses for a space."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A token for a single byte in a SentencePiece vocabulary (byte fallback)."""


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a token of a byte-level BPE (GPT-2's). An added token, which has characters outside of its alphabet,
    stands for its own text in UTF-8."""
    return bytes(map(_BYTES.__getitem__, token)) if all(c in _BYTES for c in token) else token.encode()


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet, as {character: byte}: printable Latin-1 characters stand for their own byte, U+0100 and up for
    the other bytes, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


_BYTES = _byte_of_char()
