"""A lower bound of the number of tokens of a text, by the longest token of a vocabulary.

    text    L bytes, none of which is lost or shortened      longest token: M bytes      at least L / M tokens

It holds only where every byte of a text is part of some token: byte-level BPE, and BPE with a token for each byte, with
no normalizer but those whose effect is bounded. Elsewhere nothing is proven, and the bound is 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import tokenizers

from radixrt.checkpoint.vocabularies import BYTE_TOKEN, SPACE, byte_level_bytes
from radixrt.tokens.cuts import REGEXES, AddedToken, steps_of

MAX_UNBOUNDED_CHARS = 16_384
"""Texts of up to so many characters are encoded without looking at the bound."""
COMPOSED = 4
"""By what factor NFC may shorten a text at most (3.5 in Unicode 15: U+1FBE U+0308 U+0301 becomes U+0390)."""
KEEPING = frozenset({"ByteLevel", "Digits", "Punctuation"})
"""Pre-tokenizers that lose no character."""


class LeastTokens(NamedTuple):
    """`longest`: bytes of a text that a token stands for at most; 0 if there is no bound. With `spaces_vanish` some
    token takes any number of spaces around it."""

    longest: int = 0
    spaces_vanish: bool = False

    def of(self, text: str) -> int:
        """The fewest tokens of a text, each character of which has one byte or more."""
        if not self.longest:
            return 0
        chars = len(text)
        if self.spaces_vanish and chars > MAX_UNBOUNDED_CHARS:
            chars = sum(
                len("".join(text[at : at + MAX_UNBOUNDED_CHARS].split())) for at in range(0, chars, MAX_UNBOUNDED_CHARS)
            )
        return chars // self.longest if chars > MAX_UNBOUNDED_CHARS else 0


NO_BOUND = LeastTokens()


def of_json(
    tokenizer: tokenizers.Tokenizer, pre_tokenizer: Any, normalizer: Any, added: list[AddedToken]
) -> LeastTokens:
    """The bound for a tokenizer.json, whose stages are given as JSON."""
    model = tokenizer.model
    if not isinstance(model, tokenizers.models.BPE):
        return NO_BOUND
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    before, shortened = steps_of(pre_tokenizer, "pretokenizers"), 1
    for step in steps_of(normalizer, "normalizers"):
        match step:
            case {"type": "NFC"}:
                shortened = COMPOSED
            case {"type": "Prepend"} | {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}:
                pass
            case _:
                return NO_BOUND
    if any(step["type"] == "ByteLevel" for step in before):
        if not all(map(_keeps, before)) or len({byte for token in vocabulary for byte in _one_byte(token)}) < 256:
            return NO_BOUND
        sizes = (len(byte_level_bytes(token)) for token in vocabulary)
    elif all((step["type"], step.get("split")) == ("Metaspace", False) for step in before) and model.byte_fallback:
        if sum(BYTE_TOKEN.fullmatch(token) is not None for token in vocabulary) < 256:
            return NO_BOUND
        sizes = (len(token.encode()) for token in vocabulary)
    else:
        return NO_BOUND
    return LeastTokens(shortened * _longest(sizes, added), _takes_spaces(added))


def of_pieces(pieces: Iterable[str], num_bytes: int, added: list[AddedToken]) -> LeastTokens:
    """The bound for a SentencePiece model of BPE that does not normalize, with `num_bytes` tokens of single bytes."""
    if num_bytes < 256:
        return NO_BOUND
    return LeastTokens(_longest((len(piece.encode()) for piece in pieces), added), _takes_spaces(added))


def _longest(sizes: Iterable[int], added: list[AddedToken]) -> int:
    return max(max(sizes), *(len(token.content.encode()) for token in added), len(SPACE.encode()))


def _takes_spaces(added: list[AddedToken]) -> bool:
    """Whether some token takes any number of spaces with it."""
    return any(token.lstrip or token.rstrip for token in added)


def _one_byte(token: str) -> bytes:
    return byte_level_bytes(token) if len(token) == 1 else b""


def _keeps(step: dict[str, Any]) -> bool:
    match step:
        case {"type": "Split", "behavior": "Isolated"}:
            return True
        case {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Removed", "invert": True}:
            return regex in REGEXES
    return step["type"] in KEEPING
