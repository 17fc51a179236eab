"""Whether the ids that a request allows and bans leave any token. It is only asked when all logits are -inf after the
bans, to tell that from a model that gives no finite logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from radixrt.worker.request import Request

NONE_ALLOWED = "the ids that are allowed and banned, and the rest of the request, allow no token"


def nothing_left(request: Request, vocab_size: int, banned: Sequence[int], mask: np.ndarray | None) -> str:
    """Why no token is left, which begins with the name of the field; empty if one is. `banned`: ids with which
    sequences of bad_token_ids would be complete; `mask`: that of the grammar, as bits in int32."""
    sampling, left = request.sampling, np.zeros(vocab_size, dtype=bool)
    left[slice(None) if request.allowed is None else request.allowed] = True
    left[list(banned)] = False
    if mask is not None:
        left &= np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")[:vocab_size] > 0
    below = request.matcher is None and len(request.tokens) - request.prompt_len < sampling.min_tokens
    if below:
        left[[i for i in request.stop_ids if i < vocab_size]] = False
    if left.any():
        return ""
    fields = {"allowed_token_ids": request.allowed is not None, "bad_token_ids": len(banned) > 0, "min_tokens": below}
    return f"{next((field for field, set in fields.items() if set), 'grammar')}: {NONE_ALLOWED}"
