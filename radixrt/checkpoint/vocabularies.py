"""How vocabularies represent spaces and bytes in tokens; used for detokenization and to compile grammars;
and how they split words."""

from __future__ import annotations

import re

SPACE = "\u2581"
"""The character that SentencePiece uses for a space."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A token for a single byte in a SentencePiece vocabulary (byte fallback)."""

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = SHORT_FORMS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Regular expressions by which byte-level tokenizers split words: GPT-2's; that of Llama 3 and Qwen, with the length of
numbers open; that of Tekken and GPT-4o, which also splits at capitals."""


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
