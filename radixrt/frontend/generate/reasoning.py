"""Counts the reasoning tokens of an answer, for the usage of every API. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from radixrt.tokens import Tokenizer


def reasoning_tokens(tokenizer: Tokenizer | None, thoughts: Sequence[str], ids: bytes) -> int:
    """The number of `ids` (int32) up to the end of the last of the `thoughts`, which are in the order of the answer.
    Marks that open thoughts, and other output between two of them, are included."""
    if not thoughts or tokenizer is None:
        return 0
    parts = [tokenizer.token_bytes(token) for token in np.frombuffer(ids, "<i4").tolist()]
    at, whole = 0, b"".join(parts)
    for thought in thoughts:
        text = thought.strip().encode()
        at = max(at, whole.find(text, at)) + len(text)
    return min(int(np.searchsorted(np.cumsum([len(part) for part in parts]), at)) + 1, len(parts))
