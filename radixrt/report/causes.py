"""Why prompt tokens were computed and not reused."""

from __future__ import annotations

from typing import NamedTuple


class Misses(NamedTuple):
    """Prompt tokens computed, by cause; they sum to prompt - hit."""

    never_seen: int = 0
    """No earlier request had them at this place."""
    elsewhere: int = 0
    """Another worker held them, this one did not."""
    evicted: int = 0
    """They were seen before, but no worker held them any more (or yet), or this one lost them before it began."""
    page_rounding: int = 0
    """They end within a page; only whole pages are shared."""
    logits: int = 0
    """Computed whatever the cache holds: the last token of a prompt, or those that are scored."""


def explain(
    *, prompt: int, hit: int, reusable: int, bound: int, predicted: int, best: int, page_size: int = 1
) -> Misses:
    """Causes of the misses of one request; all arguments count tokens.

        0 ...... hit ....... predicted ....... best ....... whole ....... bound ...... reusable ..... prompt
        | reused  |   evicted   |   elsewhere   |  evicted    |  rounding   | never seen  |   logits    |

    reusable   the most that any cache may give: prompt - 1, less where tokens are scored
    bound      what an infinite cache would have given
    predicted  what the index said the worker held when the request was placed there
    best       the most that the index said any worker held then
    whole      bound, down to a multiple of the worker's page size

    Where the figures contradict this order, what was held counts as seen, and a hit is a hit: each limit is raised to
    those on its left, but none of the left four passes `whole`, nor `bound` `reusable`, unless the hit did.
    """
    reusable = max(reusable, hit)
    bound = min(max(bound, hit, predicted, best), reusable)
    whole = max(hit, bound // page_size * page_size)
    predicted = min(max(predicted, hit), whole)
    best = min(max(best, predicted), whole)
    return Misses(
        never_seen=reusable - bound,
        elsewhere=best - predicted,
        evicted=(predicted - hit) + (whole - best),
        page_rounding=bound - whole,
        logits=prompt - reusable,
    )
