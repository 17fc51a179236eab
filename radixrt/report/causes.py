"""Why prompt tokens were computed and not reused."""

from __future__ import annotations

from typing import NamedTuple


class Misses(NamedTuple):
    """Prompt tokens computed, by cause; they sum to prompt - hit."""

    never_seen: int = 0
    """No earlier request had them at this place."""
    elsewhere: int = 0
    """Another worker held them."""
    evicted: int = 0
    """They were computed once, but no worker held them any more (or yet)."""
    page_rounding: int = 0
    """They end within a page; only whole pages are shared."""
    logits: int = 0
    """Computed whatever the cache holds: the last token of a prompt, or those that are scored."""


def explain(prompt: int, hit: int, reusable: int, bound: int, best: int, page_size: int) -> Misses:
    """Causes of the misses of one request; all arguments but `page_size` count tokens.

        0 ......... hit ......... best ......... whole ..... bound ......... reusable ..... prompt
        |  reused    |  elsewhere  |   evicted    |  rounding  |  never seen     |   logits    |

    reusable  the most that any cache may give: prompt - 1, less where tokens are scored
    bound     what an infinite cache would have given (if it is known to less than the hit, the hit)
    best      the most that any worker held when the request was placed
    whole     bound, down to a multiple of the page size
    """
    hit = min(hit, reusable)
    bound = min(max(bound, hit), reusable)
    whole = max(hit, bound // page_size * page_size)
    best = min(max(best, hit), whole)
    return Misses(reusable - bound, best - hit, whole - best, bound - whole, prompt - reusable)
