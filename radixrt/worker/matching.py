"""The grammar state of each request, and the masks of tokens that may come next.

A matcher reads the request's own tokens, up to the last known one, whenever a mask is needed. So it survives
preemption, and works for a request that another worker began.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from radixrt.worker.grammar import Compiled
from radixrt.worker.jump import SHORTEST, forced_text
from radixrt.worker.request import Request

STRAYED = "grammar: the tokens generated so far do not follow it"
DEAD_END = "grammar: no token of the vocabulary can come next"


class Matcher:
    """The state of one request's text in its grammar. Where the grammar may end, the ids in `ends` are allowed: eos,
    and those `stop_token_ids` that have no text. With `ignore_eos`, eos is allowed only where nothing else is."""

    __slots__ = ("bans", "compiled", "ends", "matcher", "taken")

    def __init__(self, compiled: Compiled, request: Request) -> None:
        """Raises ValueError if no token could end the text."""
        import xgrammar

        self.ends = request.stop_ids & compiled.ends
        if not self.ends:
            raise ValueError("grammar: no token ends a text: the model names none, and stop_token_ids no special one")
        self.compiled = compiled
        self.matcher = xgrammar.GrammarMatcher(compiled.grammar, override_stop_tokens=sorted(self.ends))
        self.taken = request.prompt_len
        """How many of the request's tokens were read, or belong to the prompt."""
        self.bans = request.sampling.min_tokens > 0 or request.sampling.ignore_eos
        """Whether `banned` may return any ids."""

    def follow(self, request: Request) -> bool:
        """Read the tokens generated since the last call; False if they do not follow the grammar."""
        tokens, accept = request.tokens, self.matcher.accept_token
        while self.taken < len(tokens):
            if not accept(tokens[self.taken]):
                return False
            self.taken += 1
        return True

    def jump(self, request: Request) -> tuple[int, ...]:
        """The tokens of the text that the grammar forces next, up to the request's limit and before any stop id; empty
        if the next token is to be sampled. They count as read: the caller must append them to the request."""
        if not self.follow(request):
            return ()
        ids = self._forced(request, SHORTEST if len(request.tokens) > request.prompt_len else 1)
        ids = ids[: request.limit - len(request.tokens)]
        ids = next((ids[:n] for n, i in enumerate(ids) if i in request.stop_ids), ids)
        for n, i in enumerate(ids):
            if not self.matcher.accept_token(i):
                self.matcher.rollback(n)
                return ()
        self.taken += len(ids)
        return ids

    def _forced(self, request: Request, least: int) -> tuple[int, ...]:
        """The tokens of the text that the grammar forces next; empty if they are fewer than `least`, or if the request
        samples all tokens."""
        spelling = self.compiled.spelling
        if spelling is None or not request.jumps:
            return ()
        text = forced_text(self.matcher)
        ids = spelling.before(text) if text else ()
        return ids if len(ids) >= least else ()

    def drafted(self, request: Request, ids: Sequence[int]) -> list[int]:
        """The longest prefix of drafted ids that could be sampled one by one: it ends before a token that the grammar
        does not allow or that ends the text, and where forced text follows."""
        if not self.follow(request):
            return []
        taken = count = 0
        for i in ids:
            if i in request.stop_ids or i in self.compiled.silent or not self.matcher.accept_token(i):
                break
            taken += 1
            if self._forced(request, SHORTEST):
                break
            count += 1
        self.matcher.rollback(taken)
        return list(ids[:count])

    def fill(self, out: np.ndarray, row: int, ahead: Sequence[int]) -> None:
        """As `fill_masks`, for one row of `out`, and for the token after `ahead`, a prefix of what `drafted`
        returned."""
        taken = next((n for n, i in enumerate(ahead) if not self.matcher.accept_token(i)), len(ahead))
        _batch(1).batch_fill_next_token_bitmask([self.matcher], out, [row])
        self.matcher.rollback(taken)

    def banned(self, request: Request, ahead: int = 0) -> Iterable[int]:
        """Ids that are allowed for the next token, or the one after `ahead` more, only if nothing else is."""
        if len(request.tokens) + ahead - request.prompt_len < request.sampling.min_tokens:
            return request.stop_ids
        return self.compiled.eos_ids if request.sampling.ignore_eos else ()


def fill_masks(
    requests: Sequence[Request], out: np.ndarray, threads: int = 1, ahead: Mapping[int, Sequence[int]] | None = None
) -> dict[int, str]:
    """Write into `out`, int32[len(requests), ceil(vocabulary / 32)] in C order, which tokens may come next in each of
    `requests`, all of which have a matcher: bit i % 32 of word i // 32 for id i. For rows in `ahead`, the mask is for
    the token after these drafted ids (see `Matcher.drafted`).

    Returns, by index, why a request cannot go on; its row allows every token."""
    problems, ahead = {}, ahead or {}
    for i, request in enumerate(requests):
        matcher = request.matcher
        if matcher.taken < len(request.tokens) and not matcher.follow(request):
            problems[i] = STRAYED
    going = [i for i in range(len(requests)) if i not in problems]
    known = [i for i in going if i not in ahead] if ahead else going
    if known:
        _batch(threads).batch_fill_next_token_bitmask([requests[i].matcher.matcher for i in known], out, known)
    for i in going:
        request = requests[i]
        if i in ahead:
            request.matcher.fill(out, i, ahead[i])
        if request.matcher.bans and (banned := request.matcher.banned(request, len(ahead.get(i, ())))):
            _ban(out[i], banned)
    for i in problems:
        out[i] = -1
    # The largest word of an empty row is 0. So it is for a row with only sign bits set, hence the second check.
    for i in np.flatnonzero(out.max(1, initial=0) == 0).tolist():
        if not out[i].any():
            problems[i] = DEAD_END
            out[i] = -1
    return problems


@functools.cache
def _batch(threads: int) -> Any:
    import xgrammar

    return xgrammar.BatchGrammarMatcher(threads)


def _ban(row: np.ndarray, ids: Iterable[int]) -> None:
    """Clear the bits of `ids` in a row, unless that would leave none."""
    left = row.view(np.uint32).copy()
    for i in ids:
        if i >> 5 < len(left):
            left[i >> 5] &= ~np.uint32(1 << (i & 31))
    if left.any():
        row.view(np.uint32)[:] = left
