"""DeepSeek Sparse Attention in plain torch: which tokens queries attend to (see `indexer`), and attention to
these."""

from __future__ import annotations

import torch
from torch.nn import functional as F

QUERIES, KEYS = 8, 256
"""Size of the products of exact scores."""
MAX_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 24}
"""Elements of an intermediate result that is computed at once: products of index queries and keys, or gathered K. On a
CPU, more than its caches hold take half as long again."""
HIGHEST = torch.finfo(torch.float32).max


def select(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, top_k: int, exact: bool) -> torch.Tensor:
    """int64[T, top_k]: for the last T tokens of a sequence, the positions of the tokens that they attend to, ascending.
    All T are at positions of at least top_k - 1.

    q [T, heads, dim] and float32 weights [T, heads] are those of the last tokens, keys [L, dim] of all. `exact`: the
    result for a token does not depend on the others, to the last bit."""
    count, heads, _ = q.shape
    each = QUERIES if exact else at_once(q.device, heads * len(keys))
    at = torch.arange(len(keys), device=q.device)
    keys, selected = keys.float(), []
    for begin in range(0, count, each):
        rows = slice(begin, begin + each)
        scores = (_exact_scores if exact else _scores)(q[rows].float(), weights[rows], keys)
        # Tokens that are not finite are selected, so that what is computed from them is seen not to be finite, either.
        scores = scores.nan_to_num(nan=HIGHEST)
        last = len(keys) - count + begin + torch.arange(len(scores), device=q.device)
        selected.append(highest(scores.masked_fill(at > last[:, None], -torch.inf), top_k))
    return torch.cat(selected)


def at_once(device: torch.device, elements: int) -> int:
    """How many queries are computed at once, of which each has an intermediate result of so many elements."""
    return max(1, MAX_ELEMENTS[device.type] // elements)


def _scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Index scores float32[T, L]."""
    products = (q.flatten(0, 1) @ keys.t()).relu_().unflatten(0, (len(q), -1))
    return torch.bmm(weights[:, None], products)[:, 0]


def _exact_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """`_scores` of at most QUERIES tokens. How a product rounds depends on its shape, so all have the same shape."""
    missing = QUERIES - len(q)
    padded, own = F.pad(q, (0, 0, 0, 0, 0, missing)), F.pad(weights, (0, 0, 0, missing))
    blocks = F.pad(keys, (0, 0, 0, -len(keys) % KEYS)).split(KEYS)
    found = torch.cat([_scores(padded, own, block) for block in blocks], dim=1)
    return found[: len(q), : len(keys)]


def highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """int64[T, count]: the places of the `count` highest of each row of scores[T, L], ascending; among equal ones,
    those of the first."""
    least = scores.topk(count).values[:, -1:]
    above, equal = scores > least, scores == least
    missing = count - above.sum(1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(1) <= missing))
    return chosen.nonzero()[:, 1].view(-1, count)


def attend(q: torch.Tensor, k: torch.Tensor, rank: int, scale: float) -> torch.Tensor:
    """Attention of each query to keys of its own, in the absorbed form: [T, heads, rank] for q[T, heads, D] and
    k[T, K, D]."""
    out = F.scaled_dot_product_attention(q[:, None], k[:, None], k[:, None, :, :rank], scale=scale)
    return out[:, 0]
