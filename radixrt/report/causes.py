"""Attributes each computed prompt token to the cause for which it was not reused."""

from __future__ import annotations

from typing import NamedTuple


class Misses(NamedTuple):
    """Prompt tokens computed, by cause; they sum to prompt - hit."""

    never_seen: int = 0
    """No earlier request had the same prefix up to these tokens."""
    elsewhere: int = 0
    """Cached by another worker, but not by the one that served the request."""
    evicted: int = 0
    """Seen before, but cached by no worker at dispatch (evicted, or not computed yet), or evicted by the request's
    worker before it admitted the request. With linear attention also: cached, but after the last checkpoint of the
    prefix's state."""
    page_rounding: int = 0
    """At the end of the shared prefix, in a page that is shared only in part; only whole pages are reused."""
    logits: int = 0
    """Computed whatever the cache holds: the last token of a prompt, or the tokens that are scored."""


def explain(
    *, prompt: int, hit: int, reusable: int, ideal: int, predicted: int, best: int, page_size: int = 1
) -> Misses:
    """Causes of the misses of one request. All arguments are numbers of tokens.

        0 ...... hit ....... predicted ....... best ....... whole ....... ideal ...... reusable ..... prompt
        | reused  |   evicted   |   elsewhere   |  evicted    |  rounding   | never seen  |   logits    |

    reusable   the largest hit that is possible: prompt - 1, or fewer if tokens are scored
    ideal      the hit of an infinite cache
    predicted  the hit that the index predicted for the worker when the request was dispatched to it
    best       the largest hit that the index predicted for any worker then
    whole      ideal, rounded down to a multiple of the worker's page size

    The arguments may contradict this order, for example if the index was out of date. Then each limit is raised to the
    limits on its left; `predicted` and `best` are cut to `whole`, and `ideal` to `reusable`, but none below `hit`.
    """
    reusable = max(reusable, hit)
    ideal = min(max(ideal, hit, predicted, best), reusable)
    whole = max(hit, ideal // page_size * page_size)
    predicted = min(max(predicted, hit), whole)
    best = min(max(best, predicted), whole)
    return Misses(
        never_seen=reusable - ideal,
        elsewhere=best - predicted,
        evicted=(predicted - hit) + (whole - best),
        page_rounding=ideal - whole,
        logits=prompt - reusable,
    )


WORDS = {
    "evicted": "were computed before, and evicted since",
    "elsewhere": "are cached on another worker",
    "never_seen": "were never seen before",
    "page_rounding": "do not fill a page",
    "logits": "had to be computed for their logits",
}


def sentence(prompt: int, hit: int, misses: Misses) -> str:
    """Why a prompt missed, in short: its cause of most tokens, where one is not what any cache would miss."""
    avoidable = {name: getattr(misses, name) for name in ("evicted", "elsewhere")}
    name = max(avoidable, key=lambda one: avoidable[one])
    if not avoidable[name]:
        name = "never_seen"
    if not (tokens := getattr(misses, name)):
        return f"all that can be reused was: {hit} of {prompt} tokens"
    return f"{tokens} of {prompt} tokens {WORDS[name]}"
