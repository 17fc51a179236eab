"""The token ids of words that are not to be generated (`bad_words`, as in vLLM). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from radixrt.messages import NO_TENANT, Namespace
from radixrt.tokens import Tokenizer

MAX_BAD_WORDS = 512
MAX_CHARS = 128


def spellings(
    tokenizer: Tokenizer, words: Sequence[str], namespace: Namespace = NO_TENANT
) -> tuple[tuple[int, ...], ...]:
    """The ids of each word as the tokenizer writes it at the beginning of a text, and after a space, where these
    differ. They are encoded in `namespace`. A word that a model spells in other tokens is not among them. Raises
    ValueError for invalid Unicode."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        texts = (word.lstrip(), " " + word.lstrip())
        alone, after_space = (tuple(tokenizer.encode(text, False, namespace)) for text in texts)
        found[alone] = None
        if after_space[-len(alone) :] != alone:  # else the one covers the other
            found[after_space] = None
    return tuple(found)
